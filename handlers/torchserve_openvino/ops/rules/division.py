"""Divisions of integers, and remainders and floor divisions of floats built on the exact remainder (`exact_fmod`).

OpenVINO rounds the quotient to a float before it takes the integer part: 1.0 // 0.1 is 10 there, 9 in torch. Formulas:
torch's aten/src/ATen/native/cpu/BinaryOpsKernel.cpp, `div_floor_floating` and `remainder_kernel`.
"""

import math
from typing import Any

import torch
from openvino import Output
from openvino import opset15 as ops
from torch import Tensor
from torch.fx import Node

from torchserve_openvino.ops import integers, value_range
from torchserve_openvino.ops.exact_fmod import exact_fmod
from torchserve_openvino.ops.names import value_of
from torchserve_openvino.ops.rule_registry import (
    INSTEAD,
    Check,
    Rule,
    conversion,
    declare,
    decomposition,
    stays_whole,
)

aten = torch.ops.aten
Number = int | float | bool
# Long division costs 0.15 ms for a few values and twenty times eager's time for many (2 ms for 100,000).
MOST_VALUES = 2**12

declare(Rule(check=Check.NONZERO_DIVISOR), aten.div, aten.remainder, aten.fmod)
declare(Rule(range=value_range.quotient, integers=integers.quotient), aten.div)
declare(Rule(range=value_range.remainder), aten.remainder)
declare(Rule(integers=integers.below_second), aten.remainder, aten.fmod)
declare(
    Rule(banned="OpenVINO rounds an integer quotient towards 0" + INSTEAD, ordered_as=aten.mul.Tensor),
    aten.floor_divide.default,
)


def _rounds_right(x: Any, y: Any) -> bool:
    """Returns whether OpenVINO's own division is exact: of integers (`int_range` limits these), and by powers of 2."""
    if not any(
        operand.is_floating_point() if isinstance(operand, Tensor) else isinstance(operand, float) for operand in (x, y)
    ):
        return True
    return isinstance(y, (int, float)) and math.frexp(abs(y))[0] == 0.5


def _few(x: Any, y: Any) -> bool:
    shapes = [operand.shape for operand in (x, y) if isinstance(operand, Tensor)]
    sizes = torch.broadcast_shapes(*shapes)
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= MOST_VALUES


def _inexact_quotient(node: Node) -> str | None:
    """Returns why a remainder or floor division is neither exact in OpenVINO nor decomposed, or None."""
    reason = _rounded_quotient(node)
    if reason is None or (node.target in _EXACT and _few(*_operands(node))):
        return None
    return f"{reason}; an exact one is eager PyTorch's for more than {MOST_VALUES} values, and in narrow types"


def _rounded_quotient(node: Node) -> str | None:
    """Returns why OpenVINO's own remainder or floor division is not exact, or None."""
    floor = node.target is not aten.div.Tensor_mode or node.kwargs.get("rounding_mode") == "floor"
    if not floor or _rounds_right(*_operands(node)):
        return None
    return "OpenVINO rounds the quotient (1.0 // 0.1 is 10 there, 9 in torch)"


def _operands(node: Node) -> list[Any]:
    return [value_of(arg) if isinstance(arg, Node) else arg for arg in node.args[:2]]


def _converted(x: Any, y: Any, *kinds: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Returns both as tensors of their common dtype; None if the operator stays whole."""
    if not isinstance(x, Tensor) or _rounds_right(x, y) or not _few(x, y):
        return None
    kind = torch.result_type(x, y)
    if kind not in kinds:
        return None
    return x.to(kind), y.to(kind) if isinstance(y, Tensor) else torch.full((), y, dtype=kind)


@conversion(aten.fmod.Scalar, aten.fmod.Tensor, rule=Rule(limit=_inexact_quotient, limit_traced=_rounded_quotient))
def _fmod(x: Output, y: Output | float) -> Any:
    """Builds the remainder with the sign of ``x``, from OpenVINO's own where that is exact."""
    kind = x.get_element_type()
    right = not kind.is_real() or (not isinstance(y, Output) and _rounds_right(0.0, y))
    divisor = y if isinstance(y, Output) else ops.constant(y, dtype=kind).output(0)
    return ops.mod(x, divisor) if right else exact_fmod(x, divisor)


@decomposition(aten.fmod.Scalar)
def _fmod_in_floats(x: Tensor, y: Number) -> Tensor:
    """Casts integers first, as torch does for a divisor that is a float."""
    same = x.is_floating_point() or not isinstance(y, float)
    return NotImplemented if same else aten.fmod.Scalar(x.to(torch.get_default_dtype()), y)


# Through TorchScript, operators that need an exact remainder stay whole, in eager PyTorch. Their parts would not do:
# for quotients beyond the largest float, eager's `fmod` returns NaN in some places and not in others.
@decomposition(
    aten.remainder.Tensor,
    aten.remainder.Scalar,
    rule=Rule(limit=_inexact_quotient, limit_traced=_rounded_quotient, decompose_traced=stays_whole),
)
def _remainder(x: Any, y: Any) -> Tensor:
    both = _converted(x, y, torch.float32, torch.float16, torch.bfloat16)
    if both is None:
        return NotImplemented
    rest, divisor = torch.fmod(*both), both[1]
    return torch.where((rest != 0) & ((divisor < 0) != (rest < 0)), rest + divisor, rest)


def _floor_divide(x: Any, y: Any) -> Tensor:
    """Floor-divides float32 (torch rounds each step in float16); declines where OpenVINO is exact or eager faster."""
    if isinstance(x, Tensor) and x.is_floating_point() and isinstance(y, (int, float)) and _rounds_right(x, y):
        # Of infinity there is no remainder.
        return torch.where(x.isinf(), math.nan, torch.floor(torch.div(x, y)))
    both = _converted(x, y, torch.float32)
    if both is None:
        return NotImplemented
    x, y = both
    rest = torch.fmod(x, y)
    whole = (x - rest) / y
    whole = torch.where((rest != 0) & ((y < 0) != (rest < 0)), whole - 1, whole)
    nearest = torch.floor(whole)
    nearest = torch.where(whole - nearest > 0.5, nearest + 1, nearest)
    return torch.where(y == 0, x / y, nearest)


def _divide(x: Any, y: Any, *, rounding_mode: str | None = None) -> Tensor:
    """Divides as torch does: OpenVINO rounds integers towards 0 in mode "floor", and truncates floats in 32 bits."""
    if not isinstance(x, Tensor):
        # Two Python numbers.
        return NotImplemented
    floats = x.is_floating_point() or (y.is_floating_point() if isinstance(y, Tensor) else isinstance(y, float))
    if rounding_mode == "trunc" and floats:
        return torch.trunc(torch.div(x, y))
    if rounding_mode == "floor" and floats:
        return _floor_divide(x, y)
    if rounding_mode != "floor":
        return NotImplemented
    kind = torch.result_type(x, y)
    if kind in {torch.int8, torch.int16}:
        # The difference below would wrap around.
        wide = y.to(torch.int32) if isinstance(y, Tensor) else y
        return _divide(x.to(torch.int32), wide, rounding_mode=rounding_mode).to(kind)
    return torch.div(x - torch.remainder(x, y), y, rounding_mode="trunc")


def _divide_traced(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    floor = rounding_mode == "floor" and not _rounds_right(x, y)
    return NotImplemented if floor else _divide(x, y, rounding_mode=rounding_mode)


declare(
    Rule(
        decompose=_divide,
        decompose_traced=_divide_traced,
        limit=_inexact_quotient,
        limit_traced=_rounded_quotient,
    ),
    aten.div.Tensor_mode,
)


@decomposition(aten.div.Scalar_mode)
def _divide_by_number(x: Tensor, y: Number, *, rounding_mode: str | None = None) -> Tensor:
    return aten.div.Tensor_mode(x, y, rounding_mode=rounding_mode)


_EXACT = frozenset({aten.fmod.Tensor, aten.fmod.Scalar})
