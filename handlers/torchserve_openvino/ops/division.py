"""Remainders and floor divisions of floats out of the exact remainder (`exact_fmod`).

OpenVINO rounds the quotient to a float before it takes the whole part: 1.0 // 0.1 is 10 there, 9 in torch. Formulas:
torch's aten/src/ATen/native/cpu/BinaryOpsKernel.cpp, `div_floor_floating` and `remainder_kernel`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from torchserve_openvino.ops.names import value_of

aten = torch.ops.aten
# Long division costs 0.15 ms for a few values and twenty times eager's time for many (2 ms for 100,000).
MOST_VALUES = 2**12


def rounds_right(x: Any, y: Any) -> bool:
    """Whether OpenVINO's own division is right: of integers (`int_range` limits these), and by powers of 2."""
    if not any(each.is_floating_point() if isinstance(each, Tensor) else isinstance(each, float) for each in (x, y)):
        return True
    return isinstance(y, (int, float)) and math.frexp(abs(y))[0] == 0.5


def _few(x: Any, y: Any) -> bool:
    shapes = [each.shape for each in (x, y) if isinstance(each, Tensor)]
    sizes = torch.broadcast_shapes(*shapes)
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= MOST_VALUES


def refuse_quotient(node: Node) -> str | None:
    """The reason against a remainder or floor division that is neither right in OpenVINO nor decomposed."""
    reason = refuse_own_quotient(node)
    if reason is None or (node.target in _EXACT and _few(*_operands(node))):
        return None
    return f"{reason}; an exact one is eager PyTorch's for more than {MOST_VALUES} values, and in narrow types"


def refuse_own_quotient(node: Node) -> str | None:
    """The reason against a remainder or floor division as OpenVINO computes it by itself."""
    floor = node.target is not aten.div.Tensor_mode or node.kwargs.get("rounding_mode") == "floor"
    if not floor or rounds_right(*_operands(node)):
        return None
    return "OpenVINO rounds the quotient (1.0 // 0.1 is 10 there, 9 in torch)"


def _operands(node: Node) -> list[Any]:
    return [value_of(each) if isinstance(each, Node) else each for each in node.args[:2]]


def _converted(x: Any, y: Any, *kinds: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Both as tensors of their common type; None where the operator stays whole."""
    if not isinstance(x, Tensor) or rounds_right(x, y) or not _few(x, y):
        return None
    kind = torch.result_type(x, y)
    if kind not in kinds:
        return None
    return x.to(kind), y.to(kind) if isinstance(y, Tensor) else torch.full((), y, dtype=kind)


def _remainder(x: Any, y: Any) -> Tensor:
    both = _converted(x, y, torch.float32, torch.float16, torch.bfloat16)
    if both is None:
        return NotImplemented
    rest, divisor = torch.fmod(*both), both[1]
    return torch.where((rest != 0) & ((divisor < 0) != (rest < 0)), rest + divisor, rest)


def floor_divide(x: Any, y: Any) -> Tensor:
    """Of float32 (torch rounds each step in float16); NotImplemented where OpenVINO is right, or eager quicker."""
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


DIVISION: dict[Any, Callable[..., Any]] = {
    aten.remainder.Tensor: _remainder,
    aten.remainder.Scalar: _remainder,
}
_EXACT = frozenset({aten.fmod.Tensor, aten.fmod.Scalar})


def with_eager_remainder(table: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Decompositions for where `exact_fmod` can't be used: what needs a remainder stays whole, in eager PyTorch.

    Its parts would not do: for quotients beyond the largest float eager's `fmod` answers NaN in some places and not in
    others.
    """
    divide = table[aten.div.Tensor_mode]

    def other(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
        floor = rounding_mode == "floor" and not rounds_right(x, y)
        return NotImplemented if floor else divide(x, y, rounding_mode=rounding_mode)

    return {op: found for op, found in table.items() if op not in DIVISION} | {aten.div.Tensor_mode: other}
