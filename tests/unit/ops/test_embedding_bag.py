"""nn.EmbeddingBag, in every form, against eager PyTorch."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import torchserve_openvino as tov
from helpers import assert_same, check

I = torch.tensor  # noqa: E741
each_mode = pytest.mark.parametrize("mode", ["sum", "mean", "max"])
each_padding = pytest.mark.parametrize("padding", [None, 2])


class Classifier(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(10, 6, **options)
        self.after = nn.Linear(6, 3)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.after(self.bags(*args, **kwargs)).relu()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
@pytest.mark.slow
def test_any_bags(data: st.DataObject) -> None:
    draw = data.draw
    mode, padding = draw(st.sampled_from(["sum", "mean", "max"])), draw(st.sampled_from([None, 2, -1]))
    kind = draw(st.sampled_from([torch.int64, torch.int32]))
    last = draw(st.booleans())
    length = draw(st.integers(1, 12))
    indices = I(draw(st.lists(st.integers(0, 9), min_size=length, max_size=length)), dtype=kind)
    starts = sorted(draw(st.lists(st.integers(0, length), min_size=1, max_size=5)))
    model = Classifier(mode=mode, padding_idx=padding, include_last_offset=last).eval()
    weights = {"per_sample_weights": torch.randn(length)} if mode == "sum" and draw(st.booleans()) else {}
    check(model, indices, I([0, *starts[:-1], length if last else starts[-1]], dtype=kind), **weights)


@each_mode
@each_padding
@pytest.mark.parametrize("inference", [False, True])
def test_bags_of_one_size(mode: str, padding: int | None, inference: bool) -> None:
    model = Classifier(mode=mode, padding_idx=padding).eval()
    compiled = check(model, I([[0, 2, 2], [2, 2, 2]]))
    with torch.inference_mode() if inference else torch.no_grad():
        assert_same(compiled(I([[7, 2, 1], [9, 9, 8]])), model(I([[7, 2, 1], [9, 9, 8]])))
    assert compiled.report.summary.coverage == 1.0
    if mode == "sum":
        check(model, I([[0, 2, 2], [2, 5, 2]]), per_sample_weights=torch.randn(2, 3))


@each_mode
@each_padding
def test_dynamic_shapes(mode: str, padding: int | None) -> None:
    model = Classifier(mode=mode, padding_idx=padding).eval()
    compiled = check(model, torch.randint(0, 10, (3, 4)), dynamic=True)
    check(model, torch.randint(0, 10, (2, 7)), compiled=compiled)
    compiled = check(model, torch.randint(0, 10, (8,)), I([0, 3, 5]), dynamic=True)
    check(model, torch.randint(0, 10, (9,)), I([0, 3, 3, 9]), compiled=compiled)
    with torch.no_grad(), pytest.raises(RuntimeError, match="greater than input"):
        compiled(torch.randint(0, 10, (9,)), I([0, 3, 3, 12]))


@each_mode
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(mode: str, dtype: torch.dtype) -> None:
    check(Classifier(mode=mode, padding_idx=1).eval().to(dtype), torch.randint(0, 10, (8,)), I([0, 3, 5]))
    check(Classifier(mode=mode).eval().to(dtype), torch.randint(0, 10, (3, 4)))


def test_offsets_that_only_look_like_bags_of_one_size() -> None:
    def model(table: Tensor, indices: Tensor) -> Tensor:
        offsets = torch.arange(0, 4, 2)
        return nn.functional.embedding_bag(indices, table, offsets, mode="sum") * 2

    check(model, torch.randn(10, 4), I([1, 2, 3, 4, 5, 6]))


def test_a_padding_row_may_hold_anything() -> None:
    model = Classifier(mode="sum", padding_idx=2).eval()
    with torch.no_grad():
        model.bags.weight[2] = float("nan")
    check(model, I([[0, 2], [3, 4]]))
    check(model, I([0, 2, 3]), I([0, 2]))


def test_a_last_offset_before_the_end_runs_as_eager_does() -> None:
    compiled = check(Classifier(mode="sum", include_last_offset=True).eval(), I([1, 2, 3]), I([0, 2, 3]))
    args = I([1, 2, 3]), I([0, 1, 2])
    check(compiled.eager, *args, compiled=compiled, fallbacks={"runtime_failed": 2})


@each_mode
def test_wrong_input_is_refused_as_eager_does(mode: str) -> None:
    compiled = tov.compile(Classifier(mode=mode).eval())
    with torch.no_grad():
        compiled(I([1, 2, 3, 4]), I([0, 2]))
        for indices, offsets in (([1, 2, 10, 4], [0, 2]), ([1, 2, -1, 4], [0, 2]), ([1, 2, 3, 4], [1, 2]),
                                 ([1, 2, 3, 4], [0, 7])):  # fmt: skip
            with pytest.raises(RuntimeError):
                compiled(I(indices), I(offsets))


def test_disabled_bags_run_in_eager_and_are_counted() -> None:
    model, args = Classifier(mode="sum").eval(), (I([1, 2, 3, 4]), I([0, 2]))
    compiled = tov.compile(model, options={"disabled_ops": ["aten._embedding_bag"], "min_partition_us": 0})
    with torch.no_grad():
        assert_same(compiled(*args), model(*args))
    (fallback,) = compiled.report.fallbacks
    assert (fallback.kind, fallback.op) == ("disabled_op", "aten._embedding_bag.default")


def test_gradients() -> None:
    model = Classifier(mode="mean").train()
    compiled = tov.compile(model)
    args = I([1, 2, 3, 4]), I([0, 2])
    compiled(*args).sum().backward()
    got = model.bags.weight.grad
    model.zero_grad()
    model(*args).sum().backward()
    assert_same(got, model.bags.weight.grad)
    assert any("only gradients need" in each.reason for each in compiled.report.fallbacks)


ROWS, WIDTH = 5_000, 64


def _unequal(bags: int, most: int) -> tuple[Tensor, Tensor]:
    """Returns indices and offsets of bags of up to so many rows, some empty, also the first and the last."""
    lengths = torch.randint(0, most, (bags,))
    lengths[[0, 7, -1]] = 0
    starts = lengths.cumsum(0) - lengths
    indices = torch.randint(0, ROWS, (int(lengths.sum()),))
    indices[::5] = 2
    return indices, starts


def _with_row_2(table: nn.EmbeddingBag, values: str) -> nn.EmbeddingBag:
    with torch.no_grad():
        table.weight[2] = {"zeros": 0.0, "numbers": 3.0, "infinite": float("inf")}[values]
    return table.eval()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("values", ["zeros", "numbers", "infinite"])
@each_mode
@pytest.mark.quick(dynamic=[True], values=["numbers"])
def test_large_bags_with_padding(mode: str, values: str, dynamic: bool) -> None:
    """Nothing, a weight or a replaced row keeps the padding out, depending on its values."""
    table = _with_row_2(nn.EmbeddingBag(ROWS, WIDTH, mode=mode, padding_idx=2), values)
    compiled = check(table, *_unequal(64, 40), dynamic=dynamic)
    if dynamic:
        check(table, *_unequal(33, 90), compiled=compiled)
    check(table, torch.randint(0, 6, (64, 20)), dynamic=dynamic)


@pytest.mark.parametrize("values", ["zeros", "numbers", "infinite"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.quick(values=["zeros", "infinite"])
def test_weights_of_any_length(values: str, dynamic: bool) -> None:
    """OpenVINO does not compile its own operators with weights of an open length."""
    for padding in (None, 2):
        table = _with_row_2(nn.EmbeddingBag(ROWS, WIDTH, mode="sum", padding_idx=padding), values)
        indices, starts = _unequal(64, 40)
        if padding is None and values == "infinite":
            indices[indices == 2] = 3
        compiled = check(table, indices, starts, per_sample_weights=torch.rand(len(indices)), dynamic=dynamic)
        if dynamic:
            indices, starts = _unequal(64, 41)
            indices[indices == 2] = 3
            check(table, indices, starts, per_sample_weights=torch.rand(len(indices)), compiled=compiled)
        check(table, torch.randint(3, 9, (64, 20)), per_sample_weights=torch.rand(64, 20), dynamic=dynamic)


def test_a_padding_row_that_changes_is_noticed() -> None:
    """The conversion depends on the values of that row."""
    table = _with_row_2(nn.EmbeddingBag(ROWS, WIDTH, mode="sum", padding_idx=2), "zeros")
    args = _unequal(64, 40)
    compiled = check(table, *args)
    _with_row_2(table, "numbers")
    with torch.no_grad():
        assert_same(compiled(*args), table(*args))


@each_mode
def test_in_bfloat16_precision(mode: str) -> None:
    table = nn.EmbeddingBag(ROWS, WIDTH, mode=mode, padding_idx=2).eval()
    args = _unequal(64, 600)
    compiled = tov.compile(table, options={"precision": "bf16"})
    with torch.no_grad():
        found, expected = compiled(*args), table(*args)
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks
    assert (found - expected).abs().max() <= 2**-7 * expected.abs().max()


def test_one_bag_that_all_threads_would_write_to() -> None:
    """The maximum is a scatter, in which several rows go to the same bag."""
    table = nn.EmbeddingBag(ROWS, WIDTH, mode="max").eval()
    compiled = tov.compile(table, options={"config": {"INFERENCE_NUM_THREADS": 8}})
    indices, starts = torch.randint(0, ROWS, (20_000,)), I([0, 1])
    with torch.no_grad():
        for _ in range(5):
            assert_same(compiled(indices, starts), table(indices, starts))


@pytest.mark.parametrize("backend", ["openvino_ts", "export"])
@each_mode
def test_other_backends(backend: str, mode: str) -> None:
    for args in ((I([1, 2, 3, 4]), I([0, 2])), (I([[1, 2], [3, 4]]),)):
        model = Classifier(mode=mode).eval()
        compiled = tov.compile(model, backend=backend)
        with torch.no_grad():
            for _ in range(2):
                assert_same(compiled(*args), model(*args))
        assert compiled.report.summary.coverage == 1.0 or compiled.report.fallbacks


class Computed(Classifier):
    """Bags whose offsets are computed inside of the graph."""

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        return super().forward(indices, offsets * 2)


@each_mode
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", [Classifier, Computed])
def test_offsets_outside_the_elements(mode: str, last: bool, dynamic: bool, kind: type[Classifier]) -> None:
    model = kind(mode=mode, include_last_offset=last).eval()
    compiled = tov.compile(model, dynamic=dynamic)
    with torch.no_grad():
        for offsets in ([0, 1, 2], [0, 2, 4], [0, 0, 4], [0, 1, 1], [2, 2, 4], [0, 1, 10**6], [0, -1, 2], [4, 4, 4]):
            indices, starts = I([1, 2, 3, 4, 5, 6, 7, 8]), I(offsets)
            try:
                expected = model(indices, starts)
            except (IndexError, RuntimeError) as error:
                with pytest.raises(type(error)):
                    compiled(indices, starts)
                continue
            if min(offsets) >= 0:
                # Of bags that end before they begin, eager's kernel reads where it has nothing to read.
                assert_same(compiled(indices, starts), expected)


def test_constant_offsets_outside_the_elements() -> None:
    model, offsets = Classifier().eval(), I([0, 2, 6])
    compiled = tov.compile(lambda indices: model(indices, offsets + 0), dynamic=False)
    with torch.no_grad():
        assert_same(compiled(I([1, 2, 3, 4, 5, 6, 7])), model(I([1, 2, 3, 4, 5, 6, 7]), offsets))
        with pytest.raises((IndexError, RuntimeError)):
            compiled(I([1, 2, 3]))
