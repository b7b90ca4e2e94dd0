"""After READY nothing compiles: every batch size that batching may choose has run before, for each module."""

import random

import pytest
import torch
from own_handlers import BODY, NET, OTHER, Plain, Second, eager_answer, weights

ROWS = [BODY, OTHER, b"1,1,0,0", b"0,2,-1,1"]


class SeveralRows(Second):
    """Two modules, and requests of several rows, which are joined to one batch."""

    def preprocess(self, data):
        rows = [[float(v) for v in row["body"].decode().split(",")] for row in data]
        self.counts = [len(row) // 4 for row in rows]
        return torch.tensor([row[i : i + 4] for row in rows for i in range(0, len(row), 4)])

    def postprocess(self, data):
        return [each.tolist() for each in data.split(self.counts)]


class OneByOne(SeveralRows):
    """Its second module is called with the first two rows only."""

    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            hidden = self.model(data)
            head = self.others[0](hidden[:2])
            return torch.cat([head, hidden[2:, :2]])


class Sums(Plain):
    """Its model's rows cannot be split, as each answer depends on all of them."""

    def _load_pickled_model(self, *args):
        inner = super()._load_pickled_model(*args)

        class Joined(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                return self.inner(x) + x.sum()

        return Joined().eval()


def served(archive, kind, rows: int, batch_size: int, **section):
    def save(path) -> None:
        weights(path)
        (path.parent / "sample.txt").write_bytes(b",".join(ROWS[:rows]))

    own = {"warmup": {"samples": ["sample.txt"]}, **section}
    made = archive({"handler": {"openvino": own}}, model_file=NET, weights=save, batch_size=batch_size)
    handler = kind()
    handler.initialize(made.context)
    return made, handler


@pytest.mark.quick("2-4-SeveralRows", "3-3-OneByOne")
@pytest.mark.parametrize("kind", [SeveralRows, OneByOne])
@pytest.mark.parametrize(("rows", "batch_size"), [(1, 4), (2, 4), (3, 3), (2, 1), (4, 2)])
def test_no_request_compiles(archive, kind, rows, batch_size) -> None:
    made, handler = served(archive, kind, rows, batch_size)
    draw = random.Random(rows)
    # Long enough for `CallCosts` to try every size and every split.
    for number in range(80):
        bodies = [b",".join(draw.choices(ROWS, k=draw.randint(1, 4))) for _ in range(draw.randint(1, batch_size))]
        answers = made.handle(handler, *bodies)
        if number % 10 == 0:
            for got, expected in zip(answers, eager_answer(kind, handler, *bodies), strict=True):
                torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    report = handler.describe_handle()
    assert report["serving"]["compiles_after_ready"] == 0 and report["verify"]["passed"], report["recompiles"]


def test_other_sizes_are_compared_with_eager_as_well(archive) -> None:
    _, handler = served(archive, SeveralRows, 2, 4)
    verify = handler.describe_handle()["verify"]
    assert verify["cases"] >= 4 and verify["parts"]["others[0]"]["cases"] >= 4


@pytest.mark.parametrize(("kind", "mode"), [(Sums, "bucket"), (Plain, "exact")])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_rows_that_are_not_split_run_in_every_size(archive, batch_size, kind, mode) -> None:
    made, handler = served(archive, kind, 1, batch_size, batching={"mode": mode})
    for count in range(1, batch_size + 1):
        answers = made.handle(handler, *ROWS[:count])
        for got, expected in zip(answers, eager_answer(kind, handler, *ROWS[:count]), strict=True):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    serving = handler.describe_handle()["serving"]
    assert serving["shapes"]["joins_requests"] is (kind is Plain) and serving["compiles_after_ready"] == 0


@pytest.mark.parametrize("sizes", [[1, 4], [4]])
def test_a_size_that_the_yaml_leaves_out_is_padded_to_one_that_is_compiled(archive, sizes) -> None:
    section = {"warmup": {"inputs": [{"shape": [4]}], "batch_sizes": sizes}}
    made, handler = served(archive, Plain, 1, 4, **section)
    for rows in (1, 2, 3, 4) * 12:
        made.handle(handler, *ROWS[:rows])
        assert [made.status(place) for place in range(rows)] == [200] * rows
    assert handler.describe_handle()["serving"]["compiles_after_ready"] == 0


def test_requests_that_together_are_no_compiled_size_run_apart(archive) -> None:
    section = {"warmup": {"inputs": [{"shape": [4]}], "batch_sizes": [1, 2]}, "batching": {"mode": "exact"}}
    made, handler = served(archive, SeveralRows, 1, 4, **section)
    for counts in ([2, 1, 2], [2, 2], [1, 1, 1], [1, 2, 1, 1]):
        rows = iter(ROWS * 2)
        bodies = [b",".join(next(rows) for _ in range(count)) for count in counts]
        answers = made.handle(handler, *bodies)
        for got, expected in zip(answers, eager_answer(SeveralRows, handler, *bodies), strict=True):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    serving = handler.describe_handle()["serving"]
    assert serving["compiles_after_ready"] == 0 and not serving["counts"].get("outside_compiled")
