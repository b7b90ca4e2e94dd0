"""An index out of range raises as in eager PyTorch; OpenVINO's Gather would return zeros."""

import pytest
import torch
from torch import nn

import torchserve_openvino as tov


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, i):
        return self.table(i.reshape(-1, 1)[:, 0]) * 2


TABLE = torch.randn(40, 2)
CASES = {
    "embedding": (Embeds(), lambda i: (i,), -1),
    "index": (lambda x, i: x[i] + 1, lambda i: (torch.ones(10, 2), i), -11),
    "index_select": (lambda x, i: torch.index_select(x, 0, i) + 1, lambda i: (torch.ones(10, 2), i), -1),
    "gather": (lambda x, i: torch.gather(x, 0, i[:, None].expand(-1, 2)) + 1, lambda i: (torch.ones(10, 2), i), -1),
    "scatter": (lambda x, i: torch.scatter(x, 0, i[:, None], x * 3) + 1, lambda i: (torch.ones(10, 2), i), -1),
}


@pytest.mark.parametrize("name", CASES)
def test_an_index_out_of_range_raises_and_the_rest_is_right(name) -> None:
    model, inputs, below = CASES[name]
    compiled = tov.compile(model)
    with torch.no_grad():
        for good in ([0, 9], [3, 3]):
            args = inputs(torch.tensor(good))
            torch.testing.assert_close(compiled(*args), model(*args))
        for bad in ([0, 10], [below, 3]):
            with pytest.raises((IndexError, RuntimeError)):
                compiled(*inputs(torch.tensor(bad)))
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks


def test_a_bound_that_is_not_known_bounds_nothing() -> None:
    def forward(table, x, y):
        return table[x.argmax(1).clamp(min=y.shape[0])] + 1

    compiled = tov.compile(forward, dynamic=True)
    table, x = torch.randn(5, 3), torch.randn(6, 5)
    for size in (2, 4):
        y = torch.ones(size)
        assert torch.equal(compiled(table, x, y), forward(table, x, y))
    with pytest.raises((IndexError, RuntimeError)):
        compiled(table, x, torch.ones(7))


def test_a_negative_index_that_torch_takes_is_taken() -> None:
    compiled = tov.compile(lambda x, i: x[i] + 1)
    x = torch.arange(6.0)
    assert torch.equal(compiled(x, torch.tensor([-1, -6, 2])), x[torch.tensor([-1, -6, 2])] + 1)


def test_int32_indices_have_bounds_too() -> None:
    model = Embeds()
    compiled = tov.compile(model)
    good = torch.tensor([1, 9], dtype=torch.int32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(good), model(good))
        with pytest.raises((IndexError, RuntimeError)):
            compiled(torch.tensor([1, 12], dtype=torch.int32))
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks


# Indices that are computed inside the graph: unknown before the inference.
COMPUTED = {
    "gather": lambda x, i: torch.gather(x, 1, (i + i)[:, None]) + 1,
    "scatter": lambda x, i: torch.scatter(x * 2, 1, (i + i)[:, None], x + 5),
    "scatter_add": lambda x, i: torch.scatter_add(x * 2, 1, (i + i)[:, None], x + 5),
    "scatter_reduce": lambda x, i: torch.scatter_reduce(x * 2, 1, (i + i)[:, None], x[:, :1], "amax"),
    "index": lambda x, i: x[i + i] + 1,
    "index of two": lambda x, i: x[i, i + i] + 1,
    "index_put": lambda x, i: torch.index_put(x * 2, (i + i,), x[0]),
    "index_put of two": lambda x, i: torch.index_put(x * 2, (i, i + i), x[0, 0]),
    "index_copy": lambda x, i: (x * 2).index_copy(0, i + i, x[:2]),
    "index_add": lambda x, i: (x * 2).index_add(0, i + i, x[:2]),
    "index_fill": lambda x, i: (x * 2).index_fill(0, i + i, 0.5),
    "index_select": lambda x, i: torch.index_select(x, 0, i + i) + 1,
    "embedding": lambda x, i: nn.functional.embedding(i + i, x) + 1,
    "embedding_bag": lambda x, i: nn.functional.embedding_bag((i + i)[None], x) + 1,
    "cross_entropy": lambda x, i: nn.functional.cross_entropy(x[:2], i + i, reduction="none"),
    "max_unpool": lambda x, i: nn.functional.max_unpool1d(x[None, :1, :2], (i + i)[None, None], 2),
}


@pytest.mark.quick(threads=[2], dynamic=[False])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_index_never_leaves_the_tensor(name, threads, dynamic) -> None:
    """OpenVINO's kernels read and write at any index, and with one thread their errors are lost."""
    function = COMPUTED[name]
    options = {"min_partition_us": 0, "config": {"INFERENCE_NUM_THREADS": threads}}
    compiled = tov.compile(function, dynamic=dynamic, options=options)
    x = torch.randn(5, 5)
    with torch.no_grad():
        # Bad indices first, while memory holds no earlier answer that could pass for a result.
        for bad in ([0, 3], [30_000_000, 1], [-3, 1], [0, -30_000_000]):
            with pytest.raises((IndexError, RuntimeError)):
                compiled(x, torch.tensor(bad))
        for good in ([0, 1], [1, 0]):
            torch.testing.assert_close(compiled(x, torch.tensor(good)), function(x, torch.tensor(good)))
    summary = compiled.report.summary
    assert summary.ops_on_openvino and (dynamic or summary.coverage == 1.0), compiled.report.to_text()


@pytest.mark.parametrize("backend, dynamic", [("openvino", False), ("openvino", True), ("openvino_ts", False)])
def test_a_computed_index_of_any_layout_is_looked_at(backend, dynamic) -> None:
    def model(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[i * 3].sum(-1)

    compiled = tov.compile(model, backend=backend, dynamic=dynamic)
    index = torch.randint(0, 4, (3, 2, 4)).transpose(0, 1)
    with torch.no_grad():
        torch.testing.assert_close(compiled(TABLE, index), model(TABLE, index))
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            compiled(TABLE, index * 100)
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks
