"""Elementwise operators that OpenVINO computes differently than torch, or not at all."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from torchserve_openvino.config.op_names import packet_name
from torchserve_openvino.ops import integers, value_range
from torchserve_openvino.ops.names import op_name, packets
from torchserve_openvino.ops.rule_registry import FAILS, INSTEAD, Rule, declare, decomposition, once

aten = torch.ops.aten
Number = int | float | bool

_SHIFTS = "OpenVINO takes a shift count modulo the width of the type: a shift by 32 changes nothing"

declare(
    Rule(verified=True),
    aten.atan.default, aten.rad2deg.default,
)  # fmt: skip
declare(
    Rule(banned=_SHIFTS),
    aten.__lshift__.Tensor, aten.__rshift__.Tensor, aten.bitwise_left_shift.Tensor,
)  # fmt: skip
declare(Rule(banned="OpenVINO's loses three digits near 1 and -1"), aten.erfinv.default)
declare(Rule(banned=FAILS + ", or answers 0"), aten.gcd.default)
declare(Rule(multiplies=True), *packets("pow bitwise_left_shift __lshift__"))
declare(Rule(ordered_as=lambda grad, mask, _: aten.mul.Tensor(grad, mask)), aten.native_dropout_backward.default)
# A product with a power of 2, for which the power's kernel returns contiguous memory.
declare(Rule(ordered_as=lambda x, power: aten.mul.Tensor(x, power.contiguous())), aten.ldexp.Tensor)
declare(Rule(integers=integers.sum_of_two, range=value_range.sum_of_two), aten.add)
declare(Rule(integers=integers.sum_of_two, range=value_range.difference_of_two), aten.sub)
declare(Rule(integers=integers.sum_of_two, range=value_range.difference_from_second), aten.rsub)
declare(Rule(integers=integers.product_of_two, range=value_range.product_of_two), aten.mul)
declare(Rule(integers=integers.sum_of_bits), aten.bitwise_or, aten.bitwise_xor, aten.bitwise_not)
declare(Rule(range=value_range.bits_of_two), aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor)
declare(Rule(range=value_range.clamped), aten.clamp, aten.clamp_min, aten.clamp_max)
declare(Rule(range=value_range.least_of_two), aten.minimum)
declare(Rule(range=value_range.largest_of_two), aten.maximum)


def as_floats(x: Tensor) -> Tensor:
    """Promotes integers as torch does for functions that return floats."""
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


@decomposition(aten.trunc.default)
def _trunc(x: Tensor) -> Tensor:
    return torch.where(x < 0, x.ceil(), x.floor()) if x.is_floating_point() else x.clone()


def _power_of_number(base: Number, x: Tensor) -> Tensor:
    """Makes ``x`` contiguous: the kernel's result always is, but on fake tensors it is laid out like ``x``."""
    return NotImplemented if x.is_contiguous() else aten.pow.Scalar(base, x.contiguous())


declare(Rule(decompose_strided=_power_of_number), aten.pow.Scalar)


@decomposition(aten.exp2.default)
def _exp2(x: Tensor) -> Tensor:
    return torch.pow(2.0, as_floats(x))


@decomposition(
    aten.expm1.default,
    rule=Rule(banned="OpenVINO subtracts 1 from the exponential: small values lose all digits" + INSTEAD),
)
def _expm1(x: Tensor) -> Tensor:
    """Computes 2 tanh(x/2) / (1 - tanh(x/2)), exact for small values, and exp(x) - 1 for others."""
    x = as_floats(x)
    half = torch.tanh(x / 2)
    return torch.where(x.isnan() | (x.abs() < 1), 2 * half / (1 - half), torch.exp(x) - 1)


@decomposition(aten.signbit.default)
def _signbit(x: Tensor) -> Tensor:
    """Detects -0.0 by its reciprocal, which is negative; -0.0 itself is not less than 0."""
    return (x < 0) | ((x == 0) & (1 / x < 0)) if x.is_floating_point() else x < 0


@decomposition(aten.copysign.Tensor, aten.copysign.Scalar)
def _copysign(x: Tensor, y: Tensor | Number) -> Tensor:
    if not isinstance(y, Tensor):
        negative = math.copysign(1.0, y) < 0
        return -as_floats(x).abs() if negative else as_floats(x).abs()
    kind = torch.result_type(x, y)
    x = as_floats(x.to(kind) if kind.is_floating_point else x)
    # ``x`` is the first operand: the result takes the layout of the first.
    return x.abs() * torch.where(torch.signbit(y), -1.0, 1.0).to(x.dtype)


@decomposition(aten.hypot.default)
def _hypot(x: Tensor, y: Tensor) -> Tensor:
    """Computes the hypotenuse without squares that overflow.

    All of it is one kernel in OpenVINO, which ``isinf`` and ``isnan`` would split.
    """
    a, b = x.abs(), y.abs()
    most, least = torch.where(a < b, b, a), torch.where(a < b, a, b)
    # Equal ones may both be 0 or infinite.
    ratio = torch.where(most == least, 1.0, least / most)
    # Infinite also where the other one is NaN.
    is_infinite = (a == float("inf")) | (b == float("inf"))
    return torch.where(is_infinite, float("inf"), most * torch.sqrt(1 + ratio * ratio))


@decomposition(aten.fmax.default)
def _fmax(x: Tensor, y: Tensor) -> Tensor:
    if not torch.result_type(x, y).is_floating_point:
        return torch.maximum(x, y)
    return torch.where(x.isnan() | (x < y), y, x)


@decomposition(aten.fmin.default)
def _fmin(x: Tensor, y: Tensor) -> Tensor:
    if not torch.result_type(x, y).is_floating_point:
        return torch.minimum(x, y)
    return torch.where(x.isnan() | (x > y), y, x)


@decomposition(aten.clamp.Tensor, rule=Rule(banned="OpenVINO rounds the bounds of an integer tensor" + INSTEAD))
def _clamp(x: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    for bound in (min, max):
        if bound is not None:
            x = x.to(torch.result_type(x, bound))
    if min is not None:
        x = torch.maximum(x, min.to(x.dtype))
    return x if max is None else torch.minimum(x, max.to(x.dtype))


def _clamp_in_result_type(op: Any) -> Callable[..., Any]:
    """Casts first, as torch does: OpenVINO rounds the bounds of an integer tensor."""

    def decomposed(x: Tensor, *bounds: Number | None, **named: Number | None) -> Tensor:
        floats = any(isinstance(bound, (float, torch.SymFloat)) for bound in (*bounds, *named.values()))
        return op(as_floats(x), *bounds, **named) if floats and not x.is_floating_point() else NotImplemented

    return decomposed


for _clamp_op in (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default):
    declare(Rule(decompose=_clamp_in_result_type(_clamp_op)), _clamp_op)


@decomposition(aten.angle.default, rule=Rule(banned="OpenVINO answers 0 for NaN" + INSTEAD))
def _angle(x: Tensor) -> Tensor:
    if x.is_complex():
        return NotImplemented
    x = as_floats(x)
    return torch.where(x.isnan(), x, torch.where(x < 0, math.pi, 0.0).to(x.dtype))


@decomposition(
    aten.atan2.default,
    rule=Rule(banned="OpenVINO's is wrong for integers, negative zeros and two infinities" + INSTEAD),
)
def _atan2(y: Tensor, x: Tensor) -> Tensor:
    """Computes atan2 by quadrants; two infinities have a quotient of 1 or -1, and the sign of a zero counts."""
    kind = torch.result_type(y, x)
    kind = kind if kind.is_floating_point else torch.get_default_dtype()
    y, x = y.to(kind), x.to(kind)
    infinite = y.isinf() & x.isinf()
    quotient = torch.where(infinite, torch.sign(y) * torch.sign(x), y / x)
    base = torch.where((y == 0) & (x == 0), y, torch.atan(quotient))
    base = torch.where((y == 0) & torch.signbit(x), torch.zeros_like(base), base)
    half = torch.where(torch.signbit(y), -math.pi, math.pi).to(kind)
    behind = torch.signbit(x) & ~x.isnan()
    return base + half * behind.to(kind)


@decomposition(aten.logaddexp.default, rule=Rule(banned="OpenVINO's loses NaN" + INSTEAD))
def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    kind = torch.result_type(x, y)
    if not kind.is_floating_point:
        return NotImplemented
    x, y = x.to(kind), y.to(kind)
    most, least = torch.where(x < y, y, x), torch.where(x < y, x, y)
    result = most + torch.log1p(torch.exp(least - most))
    return torch.where(x.isnan() | y.isnan(), x + y, torch.where(most.isinf(), most, result))


def _bitwise(op: Any) -> Callable[..., Any]:
    """Makes the decomposition of an overload whose second operand is a number."""

    def decomposed(x: Tensor, y: Number) -> Tensor:
        kind = torch.result_type(x, y)
        return op(x.to(kind), torch.full((), y, dtype=kind))

    return decomposed


declare(Rule(decompose=_bitwise(torch.bitwise_or)), aten.bitwise_or.Scalar)
declare(Rule(decompose=_bitwise(torch.bitwise_xor)), aten.bitwise_xor.Scalar)


def _with_open_alpha(add: Any) -> Callable[..., Any]:
    """Multiplies by an ``alpha`` that is a symbol: torch drops it once the second operand is one (tests/contract)."""

    def decomposed(x: Tensor, y: Any, *, alpha: Number | torch.SymFloat = 1) -> Tensor:
        return add(x, y * alpha) if isinstance(alpha, torch.SymFloat) else NotImplemented

    return decomposed


declare(Rule(decompose=_with_open_alpha(aten.add.Tensor)), aten.add.Tensor)
declare(Rule(decompose=_with_open_alpha(aten.sub.Tensor)), aten.sub.Tensor)


@decomposition(aten.sub.Scalar)
def _sub(x: Tensor, y: Number, alpha: Number = 1) -> Tensor:
    return aten.sub.Tensor(x, y, alpha=alpha)


@decomposition(aten.rsub.Tensor, aten.rsub.Scalar)
def _rsub(x: Any, y: Tensor | Number, alpha: Number | torch.SymFloat = 1) -> Tensor:
    if not isinstance(alpha, torch.SymFloat):
        return NotImplemented
    scaled = x * alpha
    return aten.sub.Tensor(y, scaled) if isinstance(y, Tensor) else aten.rsub.Scalar(scaled, y)


@decomposition(aten.round.decimals)
def _round(x: Tensor, *, decimals: int) -> Tensor:
    scale = 10.0 ** abs(decimals)
    if not x.is_floating_point():
        return NotImplemented
    return torch.round(x * scale) / scale if decimals >= 0 else torch.round(x / scale) * scale


def _known_beforehand(node: Node) -> str | None:
    """Refuses the abs of a range, which OpenVINO drops if it computes it while compiling (tests/contract pins it)."""
    seen, waiting, ranges = {node}, [node], False
    while waiting:
        current = waiting.pop()
        if current.op in {"placeholder", "get_attr"}:
            return None
        ranges |= packet_name(op_name(current.target)) in {"aten.arange", "aten.linspace"}
        waiting += [source for source in current.all_input_nodes if source not in seen]
        seen.update(current.all_input_nodes)
    return "the abs of a range without inputs, which OpenVINO takes for positive" if ranges else None


@decomposition(aten.abs.default, rule=Rule(limit=_known_beforehand))
def _abs(x: Tensor) -> Tensor:
    """Computes max(x, -x) for integers: OpenVINO drops the abs of an integer range (tests/contract pins it)."""
    if x.is_floating_point() or x.is_complex():
        return NotImplemented
    # Unsigned and boolean values are their own absolute values; their negation wraps around or fails.
    return x.clone() if x.dtype in {torch.uint8, torch.bool} else torch.maximum(x, -x)


def _binary_extreme(boolean: Any) -> Callable[..., Any]:
    def decomposed(x: Tensor, y: Tensor) -> Tensor:
        return boolean(x, y) if x.dtype is torch.bool and y.dtype is torch.bool else NotImplemented

    return decomposed


declare(Rule(decompose=_binary_extreme(torch.logical_or)), aten.maximum.default)
declare(Rule(decompose=_binary_extreme(torch.logical_and)), aten.minimum.default)


@decomposition(aten.sign.default)
@once
def _sign(x: Tensor) -> Tensor:
    """Returns 0 for NaN, as torch; OpenVINO keeps it."""
    if x.dtype is torch.bool:
        return x.clone()
    return torch.where(x.isnan(), 0.0, torch.sign(x)).to(x.dtype) if x.is_floating_point() else NotImplemented


def _boolean_sum(node: Node) -> str | None:
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.dtype is torch.bool and not node.kwargs.get("alpha", 1):
        return "a sum of booleans with alpha: OpenVINO adds what alpha takes out"
    return None


declare(Rule(limit=_boolean_sum), aten.add.Tensor)
