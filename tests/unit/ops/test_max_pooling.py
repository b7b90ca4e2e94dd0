"""Max pooling over -inf and NaN equals eager PyTorch: the values, and the indices or a counted fallback."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchserve_openvino as tov
from helpers import check

OPTIONS = {"min_partition_us": 0}


def values(*shape: int, nan: bool = True) -> torch.Tensor:
    """Returns windows of -inf, of the least finite value, of a NaN and of numbers."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[..., 4:] = -math.inf
    x.view(-1)[-1] = torch.finfo(torch.float32).min
    if nan:
        x[..., 0] = math.nan
    return x


def without_infinities(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x == -math.inf, 0)


POOLS = {
    "1d": (lambda x: F.max_pool1d(x, 2), (1, 3, 8)),
    "2d": (lambda x: F.max_pool2d(x, 2), (1, 3, 8, 8)),
    "3d": (lambda x: F.max_pool3d(x, 2), (1, 3, 4, 4, 8)),
    "padding": (lambda x: F.max_pool2d(x, 3, 2, 1), (1, 3, 8, 8)),
    "dilation": (lambda x: F.max_pool2d(x, 2, 2, 0, 2), (1, 3, 8, 8)),
    "ceil_mode": (lambda x: F.max_pool2d(x, 3, 2, 0, ceil_mode=True), (1, 3, 8, 8)),
    "adaptive 1d": (lambda x: F.adaptive_max_pool1d(x, 2), (1, 3, 8)),
    "adaptive 2d": (lambda x: F.adaptive_max_pool2d(x, (3, 4)), (1, 3, 8, 8)),
    "adaptive 3d": (lambda x: F.adaptive_max_pool3d(x, 2), (1, 3, 4, 4, 8)),
    "pool of a pool": (lambda x: F.max_pool2d(F.max_pool2d(x, 2), 2), (1, 3, 8, 8)),
    "pool of real size": (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 64, 56, 56)),
    "masked": (lambda x: without_infinities(F.max_pool1d(x.masked_fill(x < 0, -math.inf), 4)), (2, 64, 128)),
}
WITH_INDICES = {
    "1d": (lambda x: F.max_pool1d(x, 2, return_indices=True), (1, 3, 8)),
    "2d": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (1, 3, 8, 8)),
    "3d": (lambda x: F.max_pool3d(x, 2, return_indices=True), (1, 3, 4, 4, 8)),
    "adaptive": (lambda x: F.adaptive_max_pool2d(x, 3, return_indices=True), (1, 3, 8, 8)),
}


def compare(function: Callable[..., Any], x: torch.Tensor, **how: Any) -> tov.CompiledModule:
    compiled = tov.compile(function, options=OPTIONS, **how)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0, equal_nan=True)
    assert compiled.report.summary.coverage == 1.0
    return compiled


@pytest.mark.quick(dtype=[torch.float32, torch.bfloat16], how=[{}])
@pytest.mark.parametrize("how", [{}, {"dynamic": True}, {"backend": "openvino_ts"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", POOLS)
def test_windows_of_minus_infinity_and_of_nan(name: str, dtype: torch.dtype, how: dict[str, Any]) -> None:
    function, shape = POOLS[name]
    assert not compare(function, values(*shape).to(dtype), **how).report.fallbacks


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", WITH_INDICES)
def test_indices_of_such_windows_come_from_eager(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    function, shape = WITH_INDICES[name]
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert not compare(function, numbers, dynamic=dynamic).report.fallbacks
    (fallback,) = compare(function, values(*shape).to(dtype), dynamic=dynamic).report.fallbacks
    assert "-inf or NaN" in fallback.reason and fallback.count == 2


def test_behind_an_activation_nothing_is_added() -> None:
    plain = tov.compile(lambda x: F.max_pool2d(F.relu(x), 2), options=OPTIONS)
    plain(values(1, 3, 8, 8, nan=False))
    assert "1x Pooling" in plain.report.to_text()


@pytest.mark.parametrize("rectify", [torch.relu, F.relu6, lambda x: x.clamp(min=-1), lambda x: x * 2])
def test_a_pool_in_front_of_a_rectifier_is_right(rectify: Callable[..., torch.Tensor]) -> None:
    check(lambda x: rectify(F.max_pool2d(x, 2)), values(1, 2, 8, 8, nan=False), options=OPTIONS)
