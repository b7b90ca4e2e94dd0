"""Moments, norms and scattered sums of float16 and bfloat16 are as close to the exact result as eager PyTorch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchserve_openvino as tov

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "var": lambda x: x.var(-1),
    "var of the population": lambda x: x.var(-1, correction=0),
    "var with a correction of 2": lambda x: x.var(-1, correction=2),
    "std": lambda x: x.std(1),
    "std of all": lambda x: x.std(),
    "var and mean": lambda x: torch.var_mean(x, -1)[0],
    "std and mean": lambda x: torch.std_mean(x, -1)[0],
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group norm": lambda x: F.group_norm(x, 4),
    "instance norm": F.instance_norm,
    "instance norm of pictures": lambda x: F.instance_norm(x.reshape(4, 8, 4, 16)),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "rms norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "cumsum": lambda x: x.cumsum(-1),
    "mean": lambda x: x.mean(1),
    "logsumexp": lambda x: x.logsumexp(-1),
}


@pytest.mark.quick(dynamic=[False], dtype=[torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_as_exact_as_eager(name: str, dynamic: bool, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    torch.manual_seed(0)
    x = (torch.randn(4, 32, 16) + 100).to(dtype)
    compiled = tov.compile(function, dynamic=dynamic, options={"min_partition_us": 0})
    with torch.no_grad():
        ours, eager, exact = compiled(x), function(x), function(x.double())
    assert ours.dtype is dtype
    error, limit = ((each.double() - exact).abs().max() / exact.abs().max() for each in (ours, eager))
    assert error <= 2 * limit + torch.finfo(dtype).eps / 2
    if not (dynamic and name == "var with a correction of 2"):
        assert compiled.report.summary.coverage == 1.0, compiled.report.to_text()


# Rows that are added to few others: sums of graph networks, and the gradients of look-ups.
SUMS: dict[str, Callable[..., Any]] = {
    "scatter_add": lambda x, i: x.new_zeros(4).scatter_add(0, i, x),
    "scatter_reduce": lambda x, i: x.new_zeros(4).scatter_reduce(0, i, x, "sum"),
    "mean": lambda x, i: x.new_zeros(4).scatter_reduce(0, i, x, "mean"),
    "product": lambda x, i: x.new_ones(4).scatter_reduce(0, i, 0.9 + x / 5, "prod"),
    "index_add": lambda x, i: x.new_zeros(4).index_add(0, i, x, alpha=2),
    "index_put": lambda x, i: x.new_zeros(4).index_put((i,), x, accumulate=True),
}
# The value looked up has the same dtype.
LOOK_UPS: dict[str, Callable[..., Any]] = {
    "index": lambda x, i: x[i],
    "embedding": lambda x, i: F.embedding(i, x.unsqueeze(1)),
    "gather": lambda x, i: x.gather(0, i),
    "cummin": lambda x, i: x.repeat(i.shape[0] // 4).cummin(0)[0],
    "max_pool": lambda x, i: F.max_pool1d(x.repeat(i.shape[0] // 4).view(1, 1, -1), 50, 1),
}


@pytest.mark.quick(dynamic=[False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_many_rows_are_as_exact_as_eager(name: str, dynamic: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function, index, x = SUMS[name], torch.randint(0, 4, (1200,)), torch.rand(1200).to(dtype)
    compiled = tov.compile(function, dynamic=dynamic, options={"min_partition_us": 0})
    with torch.no_grad():
        ours, eager, exact = compiled(x, index), function(x, index), function(x.double(), index)
    assert ours.dtype is dtype
    error, limit = ((each.double() - exact).abs().max() / exact.abs().max() for each in (ours, eager))
    assert error <= limit + torch.finfo(dtype).eps
    assert compiled.report.summary.coverage == 1.0, compiled.report.to_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LOOK_UPS)
def test_gradients_of_look_ups_are_as_exact_as_eager(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function, index, x = LOOK_UPS[name], torch.randint(0, 4, (1200,)), torch.rand(4).to(dtype)
    factors = torch.rand(1200)

    def gradient(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        result = call(x, index)
        result.backward(factors[: result.numel()].to(dtype).to(x.dtype).view(result.shape))
        assert x.grad is not None
        return x.grad.double()

    compiled = tov.compile(function, dynamic=False, options={"min_partition_us": 0})
    exact = gradient(function, x.double())
    error, limit = ((gradient(call, x) - exact).abs().max() / exact.abs().max() for call in (compiled, function))
    assert error <= limit + torch.finfo(dtype).eps


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32], ids=str)
def test_bounds_of_another_type(dtype: torch.dtype, dynamic: bool, backend: Any) -> None:
    """A mean over what a mask selects, as sentence encoders compute it."""

    def function(hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        count = mask.sum(1, keepdim=True)
        mean = (hidden * mask.unsqueeze(-1)).sum(1) / count.clamp(min=1e-9)
        return mean, count.clamp(0.5, 2.5), count.clamp(max=1.5), torch.clamp_min(count, 0.5), count.clamp(2, 3)

    compiled = tov.compile(function, dynamic=dynamic, backend=backend, options={"min_partition_us": 0})
    with torch.no_grad():
        for length in (7, 7 + 2 * dynamic):
            inputs = torch.randn(3, length, 8), (torch.rand(3, length) > 0.4).to(dtype)
            for ours, eager in zip(compiled(*inputs), function(*inputs), strict=True):
                torch.testing.assert_close(ours, eager)
    assert compiled.report.summary.coverage == 1.0, compiled.report.to_text()
    assert compiled.report.fallback_counts() == {}


@pytest.mark.parametrize("eps", [1e-12, 1e-9, 1e-6, 1e-5])
def test_an_eps_that_float16_does_not_have(eps: float) -> None:
    layers = {
        "layer": (torch.nn.LayerNorm(64, eps=eps), (4, 64)),
        "large layer": (torch.nn.LayerNorm((300, 300), eps=eps), (300, 300)),
        "batch": (torch.nn.BatchNorm1d(8, eps=eps), (4, 8, 3)),
        "group": (torch.nn.GroupNorm(2, 8, eps=eps), (4, 8, 3)),
    }
    for layer, shape in layers.values():
        model = layer.half().eval()
        compiled = tov.compile(model, options={"min_partition_us": 0})
        for x in (torch.zeros(shape), torch.randn(shape), torch.full(shape, 3.0)):
            with torch.no_grad():
                torch.testing.assert_close(compiled(x.half()), model(x.half()), rtol=4e-3, atol=4e-3)


# float16 ends at 65,504, and has few digits below 6e-5.
NUMBERS: dict[str, Any] = {
    "quotient": lambda x: x / 1e6,
    "quotient by a size": lambda x: x / (x.shape[0] * 20_000),
    "quotient by a tensor": lambda x: x / torch.tensor(70_175.0),
    "quotient of a number": lambda x: 100_000 / (x * 10 + 50),
    "product": lambda x: x * 70_000,
    "small product": lambda x: (x * 1000) * 3e-6,
    "sum, which is float16 in torch": lambda x: (x - 4) * 16_000 + 70_000,
    "sum with a factor": lambda x: torch.add(x, x * 1000, alpha=1e-6),
    "mean of a pooled sum": lambda x: x.sum(0) / (x.numel() * 1000),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_float16_does_not_hold(name: str, dynamic: bool) -> None:
    function = NUMBERS[name]
    compiled = tov.compile(function, dynamic=dynamic, options={"min_partition_us": 0})
    for rows in (64, 48):
        x = (torch.rand(rows, 16, generator=torch.Generator().manual_seed(rows)) * 0.9).half()
        torch.testing.assert_close(compiled(x), function(x), rtol=2e-3, atol=1e-7)
    assert compiled.report.summary.coverage == 1.0
