"""Integers of 8 and 16 bits wrap around, as in eager PyTorch, on OpenVINO."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchserve_openvino as tov
from helpers import assert_same

KINDS = (torch.uint8, torch.int8, torch.int16)
OPTIONS = {"min_partition_us": 0}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sums": lambda x, y: (x + y, x - y, x + 100, 7 - x, torch.add(x, y, alpha=3), torch.sub(x, y, alpha=2)),
    "products": lambda x, y: (x * y, x * 3, -x * 101, x * x * y),
    "unary": lambda x, y: (-x, ~x, x.abs(), x.sign(), torch.relu(x)),
    "reductions": lambda x, y: (
        x.sum(1), x.sum(dtype=x.dtype), x.sum(0, dtype=x.dtype), x.cumsum(0, dtype=x.dtype), x.amax(1),
        x.min(), x.max(0),
    ),
    "comparisons": lambda x, y: (x < y, x == y, x >= 5, x != 3, (x + y) > x),
    "bits": lambda x, y: (x & y, x | y, x ^ y, x & 15, x | 3, x ^ 85),
    "shifts": lambda x, y: (x << 1, x << 7, x >> 1, x >> 4, x << 3 >> 3),
    "quotients": lambda x, y: (
        x // 3, x % 7, x // (y | 1), x % (y | 1), torch.fmod(x, 5), torch.div(x, 4, rounding_mode="trunc")
    ),
    "numbers beyond the type": lambda x, y: (
        x + 300, 1000 - x, x * 1000, x & 511, x // -1, x // 300, x % -7, x << 9, x >> 9
    ),
    "orders": lambda x, y: (x.sort(stable=True, dim=1), x.topk(3)[0], x.argmax(1), x.any(1)),
    "powers and ranges": lambda x, y: (
        x**2, x**3, torch.square(y), x + torch.arange(32, dtype=x.dtype), x.floor(), x.round()
    ),
    "extremes": lambda x, y: (
        x.clamp(3, 90), x.clamp(min=5), torch.maximum(x, y), torch.minimum(x, y), x.clamp(y.clamp(max=50), y)
    ),
    "choices": lambda x, y: (torch.where(x > y, x, y), x.masked_fill(x > 5, 3), torch.cat([x, y + y])),
    "in floats": lambda x, y: ((x - y).float() / 255, (x + y) * 0.5, x + 1.5, (x * y).to(torch.int64) * 100),
}  # fmt: skip


class Called(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.function(x, y)


def values(kind: torch.dtype, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    limits = torch.iinfo(kind)
    ends = torch.tensor([limits.min, limits.min + 1, limits.max - 1, limits.max, 0, 1, 2, 3])
    x, y = (torch.randint(limits.min, limits.max + 1, (rows, 32)) for _ in range(2))
    x[0], y[0] = ends.repeat(4), ends.repeat_interleave(4)
    return x.to(kind), y.to(kind)


@pytest.mark.quick(kind=[torch.uint8, torch.int16], dynamic=[False], backend=["openvino"])
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_wrap_around(name: str, kind: torch.dtype, dynamic: bool, backend: Any) -> None:
    function = FUNCTIONS[name]
    compiled = tov.compile(Called(function).eval(), dynamic=dynamic, backend=backend, options=OPTIONS)
    with torch.no_grad():
        for rows in (40, 40 + 9 * dynamic):
            inputs = values(kind, rows)
            assert_same(compiled(*inputs), function(*inputs), strides=False)
    # Sums of 16 bits, or of any number of values, may exceed what OpenVINO adds exactly.
    if name != "reductions" or not (dynamic or kind is torch.int16):
        assert compiled.report.summary.coverage == 1.0, compiled.report.to_text()
        assert compiled.report.fallback_counts() == {}, compiled.report.to_text()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_all_pairs(kind: torch.dtype) -> None:
    limits = torch.iinfo(kind)
    each = torch.arange(limits.min, limits.max + 1, 1 if limits.bits == 8 else 251).to(kind)

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        x, y = x[:, None], y[None]
        return x + y, x - y, x * y, x & y, torch.maximum(x, y), x < y

    compiled = tov.compile(function, dynamic=False, options=OPTIONS)
    with torch.no_grad():
        assert_same(compiled(each, each), function(each, each))
    assert compiled.report.summary.coverage == 1.0


@pytest.mark.parametrize("function", [
    lambda x: x.clamp(min=-3), lambda x: x.clamp(-1, 10), lambda x: x.clamp_min(-5), lambda x: x.clamp(max=-1),
    lambda x: x.masked_fill(x > 4, -2), lambda x: x.clamp(1, 4),
])  # fmt: skip
@pytest.mark.parametrize("kind", [torch.uint8, torch.int8])
def test_negative_limits_wrap_in_bytes(function, kind) -> None:
    x = torch.tensor([0, 1, 5, 120], dtype=kind)
    assert tov.compile(function, options=OPTIONS)(x).equal(function(x))
