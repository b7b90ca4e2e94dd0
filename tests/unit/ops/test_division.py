"""Remainders and floor divisions of floats: exact on OpenVINO for small tensors, in eager PyTorch for large ones."""

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

import torchserve_openvino as tov
from helpers import check
from torchserve_openvino.ops.rules.division import MOST_VALUES

NAN, INF, LARGEST = float("nan"), float("inf"), torch.finfo(torch.float32).max
ALL: dict[str, Any] = {"min_partition_us": 0}
TENTHS = torch.arange(-50, 50) * 0.1
EDGES = torch.tensor([NAN, INF, -INF, 0.0, 1.0, -5.0, 5.0, 1e30, 3e38, -2.5, 7.0, LARGEST, -LARGEST, LARGEST])
OTHERS = torch.tensor([1.0, 2.0, 3.0, 3.0, 0.0, 3.0, -3.0, 1e-30, -1e-30, INF, NAN, 3.0, 127.99999, LARGEST])
Division = Callable[[Tensor, Any], Tensor]
DIVISIONS: dict[str, Division] = {
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
}


def exact(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.quick(divisor=[0.1, 3, -2])
@pytest.mark.parametrize("name", DIVISIONS)
@pytest.mark.parametrize("divisor", [0.1, -0.7, 3, 6.2831853, 1e-6, 0.25, -2])
def test_by_a_number(name: str, divisor: float) -> None:
    division = DIVISIONS[name]
    for x in (TENTHS, TENTHS * 1234.5):
        compiled = check(lambda x: division(x, divisor), x, options=ALL)
        exact(compiled(x), division(x, divisor))
        torch._dynamo.reset()


@pytest.mark.parametrize("name", DIVISIONS)
def test_values_at_the_edges(name: str) -> None:
    division = DIVISIONS[name]
    exact(check(division, EDGES, OTHERS, options=ALL)(EDGES, OTHERS), division(EDGES, OTHERS))


BY_ZERO = {
    "//": lambda x: x // 0 + 1,
    "%": lambda x: x % 0 + 1,
    "fmod": lambda x: torch.fmod(x, 0) + 1,
    "div, trunc": lambda x: torch.div(x, 0, rounding_mode="trunc") + 1,
}


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("name", BY_ZERO)
def test_integers_by_the_number_0_are_refused_as_by_torch(name: str, backend: str) -> None:
    x = torch.tensor([5, -3, 7])
    compiled = tov.compile(BY_ZERO[name], backend=backend, options=ALL)
    for call in (BY_ZERO[name], compiled, compiled):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            call(x)


@pytest.mark.parametrize("name", DIVISIONS)
def test_through_torchscript_the_remainder_is_eager_pytorchs(name: str) -> None:
    """The TorchScript frontend uses OpenVINO's own remainder, which rounds the quotient."""
    x, y = torch.cat([EDGES, TENTHS]), torch.cat([OTHERS, torch.full((100,), 0.1)])
    compiled = tov.compile(lambda x, y: DIVISIONS[name](x, y) + 1, backend="openvino_ts", options=ALL)
    exact(compiled(x, y), DIVISIONS[name](x, y) + 1)
    (fallback,) = compiled.report.fallbacks
    assert fallback.kind == "unsupported_op" and "rounds the quotient" in fallback.reason
    compiled = tov.compile(lambda x: DIVISIONS[name](x, 0.5) + 1, backend="openvino_ts", options=ALL)
    exact(compiled(TENTHS), DIVISIONS[name](TENTHS, 0.5) + 1)
    assert compiled.report.summary.coverage == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types(dtype: torch.dtype) -> None:
    x, y = (TENTHS * 77).to(dtype), torch.full((100,), 0.3, dtype=dtype)
    for division in (torch.fmod, torch.remainder):
        exact(check(division, x, y, options=ALL)(x, y), division(x, y))
    check(DIVISIONS["floor"], x, y, coverage=0.0, fallbacks={"unsupported_op": 1}, options=ALL)


@pytest.mark.parametrize("name", DIVISIONS)
def test_many_values_are_eager_pytorchs(name: str) -> None:
    x = torch.linspace(-9, 9, MOST_VALUES + 1)
    compiled = check(
        lambda x: DIVISIONS[name](x, 0.1) + 1, x, coverage=0.5, fallbacks={"unsupported_op": 1}, options=ALL
    )
    assert "rounds the quotient" in compiled.report.fallbacks[0].reason
    torch._dynamo.reset()
    check(lambda x: DIVISIONS[name](x, 0.5) + 1, x, options=ALL)


def _each(x: Tensor, y: Tensor) -> list[Tensor]:
    return [division(x, y) for division in DIVISIONS.values()]


COMPILED = tov.compile(_each, options=ALL)
# OpenVINO flushes subnormal numbers to 0.
NUMBERS = st.floats(-LARGEST, LARGEST, width=32, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-30)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=5, max_size=5))
@example([(1.0, 0.1), (1e8, 3.9), (3e38, 1.1e-30), (-0.3, 0.1), (2.0**24, 3.0)])
@example([(3e38, 3e38), (3e38, 1e35), (3.4e38, 1.7e38), (0.0, 3e38), (1.0, 3e38)])
def test_any_two_numbers(pairs: list[tuple[float, float]]) -> None:
    x, y = (torch.tensor(side) for side in zip(*pairs, strict=True))
    for ours, theirs in zip(COMPILED(x, y), _each(x, y), strict=True):
        exact(ours, theirs)
    assert not COMPILED.report.fallbacks


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8])
def test_floor_division_of_narrow_integers(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.min, limits.min + 1, -1 if limits.min else 1, 0, 5, limits.max], dtype=dtype)
    for function in (lambda x: x // 3, lambda x: torch.div(x, x.clamp_max(7) | 1, rounding_mode="floor")):
        compiled = tov.compile(function, options={"min_partition_us": 0})
        torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.parametrize("function", [
    lambda x: x // 2.0, lambda x: x // 0.5, lambda x: x // -4.0, lambda x: torch.div(x, 8.0, rounding_mode="floor"),
])  # fmt: skip
def test_infinity_has_no_whole_part(function) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 5.3, -5.3, 0.0, 1e30])
    torch.testing.assert_close(tov.compile(function)(x), function(x), rtol=0, atol=0, equal_nan=True)
