"""Arithmetic of 8 and 16 bits: torch wraps around, OpenVINO saturates. It is computed in 32 bits, and wrapped."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree

from torchserve_openvino.ops.rule_registry import NARROW_INTEGERS, Decomposition, Rule, declare

aten = torch.ops.aten
_BYTES = frozenset({torch.uint8, torch.int8})
Number = int | float | bool


def _narrow_result(op: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """Returns the type of an operator's result, if that is a narrow integer computed from narrow integers."""
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    if not any(tensor.dtype in NARROW_INTEGERS or "dtype" in kwargs for tensor in tensors):
        return None
    if any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        return None
    with disable_proxy_modes_tracing():
        results = [value for value in pytree.tree_leaves(op(*args, **kwargs)) if isinstance(value, Tensor)]
    return results[0].dtype if results[0].dtype in NARROW_INTEGERS else None


def wrapped(x: Tensor, kind: torch.dtype) -> Tensor:
    """Casts to a narrower type as torch does: with the lowest bits of a value.

    Args:
        x: int32, up to 2^24, within which OpenVINO's remainder is exact.
        kind: The type.
    """
    limits = torch.iinfo(kind)
    count = limits.max - limits.min + 1
    rest = torch.remainder(x - limits.min, count) + limits.min if limits.min else torch.remainder(x, count)
    return rest.to(kind)


def in_32_bits(op: Any, *, exceeds: bool, numbers: bool = False, limits: bool = False) -> Decomposition:
    """Makes the decomposition of an operator for narrow integers.

    Args:
        op: The operator.
        exceeds: Whether a result may lie outside the range of its type.
        numbers: Whether both operands may be numbers, which torch wraps to the type of the result.
        limits: Whether the numbers among the arguments are values: a negative one wraps in an unsigned type.
    """

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        kind = _narrow_result(op, args, kwargs)
        if kind is None:
            return NotImplemented
        if kwargs.get("dtype") is not None:
            kwargs = {**kwargs, "dtype": torch.int32}
        if numbers:
            args = tuple(arg if isinstance(arg, Tensor) else _wrapped_number(arg, kind) for arg in args)
        elif not all(_fits(arg, kind) for arg in (*args, *kwargs.values())):
            # torch raises.
            return NotImplemented
        elif limits:
            args, kwargs = pytree.tree_map_only((int, float), partial(_wrapped_limit, kind=kind), (args, kwargs))
        wide = op(*pytree.tree_map_only(Tensor, _wide, args), **pytree.tree_map_only(Tensor, _wide, kwargs))
        if isinstance(wide, Tensor):
            return wrapped(wide.to(torch.int32), kind) if exceeds else wide.to(kind)
        return tuple(result.to(kind) if i == 0 else result for i, result in enumerate(wide))

    return decomposed


def _wrapped_number(x: Number, kind: torch.dtype) -> int:
    limits = torch.iinfo(kind)
    return (int(x) - limits.min) % 2**limits.bits + limits.min


def _wrapped_limit(x: Number, kind: torch.dtype) -> Number:
    return x if isinstance(x, bool) or x >= 0 or kind.is_signed else _wrapped_number(x, kind)


def _fits(x: Any, kind: torch.dtype) -> bool:
    limits = torch.iinfo(kind)
    return not isinstance(x, (int, float)) or (-limits.max <= x <= limits.max)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.int32) if x.dtype in NARROW_INTEGERS else x


def product_in_bytes(op: Any) -> Decomposition:
    """Multiplies numbers of 16 bits byte by byte: their product has 30 bits, of which OpenVINO keeps 24."""
    narrow = in_32_bits(op, exceeds=True, numbers=True)

    def decomposed(x: Tensor, y: Tensor | Number) -> Tensor:
        if _narrow_result(op, (x, y), {}) is not torch.int16:
            return narrow(x, y)
        x, y = _wide(x), _wide(y) if isinstance(y, Tensor) else _wrapped_number(y, torch.int16)
        low = torch.remainder(x, 2**8)
        high = torch.div(x - low, 2**8, rounding_mode="trunc")
        return wrapped(torch.remainder(high * y, 2**8) * 2**8 + low * y, torch.int16)

    return decomposed


def _shift(op: Any, left: bool) -> Decomposition:
    """Shifts by a number: a product with a power of 2, or a division that rounds down."""

    def decomposed(x: Tensor, count: Tensor | Number) -> Any:
        if isinstance(count, Tensor) or _narrow_result(op, (x, count), {}) is not x.dtype:
            return NotImplemented
        bits = torch.iinfo(x.dtype).bits
        inside = 0 <= count < bits
        if left:
            return x * 2 ** int(count) if inside else torch.zeros_like(x)
        if x.dtype is torch.uint8 and not inside:
            return torch.zeros_like(x)
        divisor = 2 ** int(count if inside else bits - 1)
        return torch.div(_wide(x), divisor, rounding_mode="floor").to(x.dtype)

    return decomposed


def _power(x: Tensor, power: Number) -> Tensor:
    """Multiplies with itself; other powers than the second and third stay whole."""
    if x.dtype not in NARROW_INTEGERS or isinstance(power, float) or power not in {2, 3}:
        return NotImplemented
    return x * x if power == 2 else x * x * x


def _unchanged(x: Tensor) -> Tensor:
    return x.clone() if x.dtype in NARROW_INTEGERS else NotImplemented


def _arange(start: Number, end: Number, step: Number = 1, *, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
    if dtype not in NARROW_INTEGERS or not all(isinstance(bound, int) for bound in (start, end, step)):
        return NotImplemented
    return aten.arange.start_step(start, end, step, dtype=torch.int32, **rest).to(dtype)


def _reinterpret(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Adds or subtracts 256 for the sign; OpenVINO can't read the bytes of other types as another type's."""
    if dtype is x.dtype:
        return aten.view.default(x, list(x.shape))
    if x.dtype is torch.bool and dtype in _BYTES:
        return x.to(dtype)
    if x.dtype not in _BYTES or dtype not in _BYTES:
        return NotImplemented
    wide = x.to(torch.int32)
    moved = (
        torch.where(wide < 0, wide + 256, wide) if dtype is torch.uint8 else torch.where(wide > 127, wide - 256, wide)
    )
    return moved.to(dtype)


def _declare(exceeds: bool, *operators: Any, numbers: bool = False, limits: bool = False) -> None:
    for op in operators:
        declare(Rule(decompose_narrow=in_32_bits(op, exceeds=exceeds, numbers=numbers, limits=limits)), op)


_declare(
    True,
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar,
    aten.floor_divide.default, aten.div.Tensor_mode, aten.remainder.Tensor, aten.remainder.Scalar, aten.fmod.Tensor,
    aten.fmod.Scalar, numbers=True,
)  # fmt: skip
_declare(
    False,
    aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.bitwise_and.Scalar,
    aten.bitwise_or.Scalar, aten.bitwise_xor.Scalar, numbers=True,
)  # fmt: skip
_declare(
    True,
    aten.neg.default, aten.abs.default, aten.bitwise_not.default, aten.sum.default, aten.sum.dim_IntList,
)  # fmt: skip
_declare(
    False,
    aten.maximum.default, aten.minimum.default, aten.clamp.Tensor, aten.amax.default, aten.amin.default,
    aten.max.default, aten.min.default, aten.max.dim, aten.min.dim, aten.relu.default, aten.sign.default,
    aten.masked_fill.Tensor, aten.sort.stable, aten.topk.default,
)  # fmt: skip
_declare(
    False, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.masked_fill.Scalar, limits=True
)
declare(Rule(decompose_narrow=_power), aten.pow.Tensor_Scalar)
declare(Rule(decompose_narrow=_arange), aten.arange.start_step)
declare(Rule(decompose=_reinterpret, banned="OpenVINO can't read bytes as another type"), aten.view.dtype)
for _op in (aten.floor.default, aten.ceil.default, aten.round.default):
    declare(Rule(decompose_narrow=_unchanged), _op)
for _op in (aten.__lshift__.Scalar, aten.bitwise_left_shift.Tensor_Scalar):
    declare(Rule(decompose_narrow=_shift(_op, left=True)), _op)
for _op in (aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor_Scalar):
    declare(Rule(decompose_narrow=_shift(_op, left=False)), _op)
