"""TorchScript's operators on numbers, lists, texts and sizes, as Python computes them.

TorchScript's interpreter has these by itself; torch's dispatcher, through which all operators on tensors go, does not.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

# The numbers by which TorchScript names types (c10/core/ScalarType.h), layouts and memory formats.
DTYPES = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 9: torch.complex64, 10: torch.complex128, 11: torch.bool, 15: torch.bfloat16,
}  # fmt: skip
DTYPE_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
LAYOUTS = {0: torch.strided, 1: torch.sparse_coo}
LAYOUT_NUMBERS = {layout: number for number, layout in LAYOUTS.items()}
MEMORY_FORMATS = {
    0: torch.contiguous_format, 1: torch.preserve_format, 2: torch.channels_last, 3: torch.channels_last_3d,
}  # fmt: skip


def _append(items: list[Any], item: Any) -> list[Any]:
    items.append(item)
    return items


def _extend(items: list[Any], others: list[Any]) -> None:
    items.extend(others)


def _set_item(items: Any, key: Any, value: Any) -> Any:
    items[key] = value
    return items


def _slice(items: Any, start: int | None, end: int | None, step: int = 1) -> Any:
    return items[start:end:step]


def _range_length(start: int, end: int, step: int) -> int:
    return len(range(start, end, step))


def _derive_index(index: int, start: int, step: int) -> int:
    return start + index * step


def _dtype_number(tensor: torch.Tensor) -> int:
    return DTYPE_NUMBERS[tensor.dtype]


def _layout_number(tensor: torch.Tensor) -> int:
    return LAYOUT_NUMBERS[tensor.layout]


def single_or_double(tensor: torch.Tensor, single: torch.Tensor, double: torch.Tensor) -> torch.Tensor:
    """Returns the form of a number with which an operator computes beside a tensor.

    A trace holds Python's floats as tensors of float64 without dimensions. Beside a float32 tensor with dimensions,
    torch rounds them to float32 first; OpenVINO would compute in float64, as the types say.
    """
    return single if tensor.dtype is torch.float32 and tensor.dim() > 0 else double


def _tensor(data: Any, dtype: int | None = None, device: Any = None, requires_grad: bool = False) -> torch.Tensor:
    return torch.tensor(data, dtype=None if dtype is None else DTYPES[dtype])


def _as_tensor(data: Any, dtype: int | None = None, device: Any = None) -> torch.Tensor:
    return torch.as_tensor(data, dtype=None if dtype is None else DTYPES[dtype])


def _quotient(dividend: float, divisor: float) -> float:
    # As in C, where nothing raises.
    if divisor == 0:
        return dividend * math.copysign(math.inf, divisor) if dividend != 0 else math.nan
    return dividend / divisor


def _floor_quotient(dividend: float, divisor: float) -> float:
    """Floor-divides: floats by their rounded quotient, where Python takes the exact one."""
    if not isinstance(dividend, float) and not isinstance(divisor, float):
        return dividend // divisor
    quotient = _quotient(float(dividend), float(divisor))
    # The zero keeps its sign.
    return float(math.floor(quotient)) if math.isfinite(quotient) and quotient != 0 else quotient


def power(base: float, exponent: float) -> float:
    """Raises to a power as TorchScript does: NaN and infinity instead of complex numbers and most errors."""
    if base == 0 and exponent < 0:
        raise RuntimeError("0.0 cannot be raised to a negative power")
    try:
        result = float(base) ** float(exponent)
    except OverflowError:
        return -math.inf if base < 0 and exponent % 2 == 1 else math.inf
    return math.nan if isinstance(result, complex) else result


def _least(first: Any, *second: Any) -> Any:
    # In this order, as for NaN.
    return (first if first < second[0] else second[0]) if second else min(first)


def _most(first: Any, *second: Any) -> Any:
    return (first if first > second[0] else second[0]) if second else max(first)


def _text(value: Any) -> str:
    """Writes a value as TorchScript does: floats with all digits, whole ones with a point behind them."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    return f"{value:.0f}." if value == math.floor(value) and abs(value) < 1e10 else f"{value:.17g}"


def truncated_quotient(dividend: int, divisor: int) -> int:
    """Divides integers, and rounds to zero."""
    quotient = abs(dividend) // abs(divisor)
    return quotient if (dividend >= 0) == (divisor > 0) else -quotient


def format_text(template: str, *values: Any) -> str:
    """Replaces each ``{}`` by a value; Python's own `format` would also read attributes of the values."""
    parts = template.split("{}")
    texts = [*map(_text, values), *[""] * len(parts)]
    return "".join(part + text for part, text in zip(parts, texts, strict=False))


def _sqrt(value: float) -> float:
    # As in C, where nothing raises.
    return math.sqrt(value) if value >= 0 else math.nan


def _log(value: float) -> float:
    if value > 0:
        return math.log(value)
    return -math.inf if value == 0 else math.nan


def _autocast_on_cpu() -> bool:
    return torch.is_autocast_enabled("cpu")


def _sizes(tensor: torch.Tensor) -> list[int]:
    return list(tensor.size())


# Operators whose arguments may be tensors, but which read their properties, or take values out of them: functions of
# the arguments, or their form in Python, so that a graph break is reported at the line of the user's code.
OF_TENSORS: Mapping[str, Callable[..., Any] | str] = {
    "aten::size": _sizes,
    "aten::size.int": "{}.size({})",
    "aten::len": len,
    "aten::dim": "{}.dim()",
    "aten::numel": "{}.numel()",
    "aten::is_floating_point": "{}.is_floating_point()",
    "aten::is_complex": "{}.is_complex()",
    "aten::item": "{}.item()",
    "aten::Int": int,
    "aten::Float": float,
    "aten::Bool": bool,
    "aten::IntImplicit": "{}.item()",
    "aten::FloatImplicit": "{}.item()",
    "aten::ScalarImplicit": "{}.item()",
    "aten::__getitem__": operator.getitem,
    "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not,
    "aten::append": _append,
    "aten::extend": _extend,
    "aten::_set_item": _set_item,
    "aten::list": list,
    "aten::tensor": _tensor,
    "aten::as_tensor": _as_tensor,
    "prim::device": "{}.device",
    "prim::type": "{}.type",
    "prim::dtype": _dtype_number,
    "prim::layout": _layout_number,
    "prim::is_cuda": "{}.is_cuda",
    "prim::is_nested": "{}.is_nested",
    "prim::data": "{}.detach()",
    "prim::requires_grad": "{}.requires_grad",
}
# Of these, the ones that change a list or a dictionary.
CHANGING = frozenset({"aten::append", "aten::extend", "aten::_set_item", "aten::pop"})
# Operators on everything but tensors.
OF_VALUES: Mapping[str, Callable[..., Any] | str] = {
    "aten::add": operator.add, "aten::sub": operator.sub, "aten::mul": operator.mul, "aten::div": _quotient,
    "aten::floordiv": _floor_quotient, "aten::remainder": operator.mod, "aten::neg": operator.neg,
    "aten::lt": operator.lt, "aten::le": operator.le, "aten::gt": operator.gt, "aten::ge": operator.ge,
    "aten::eq": operator.eq, "aten::ne": operator.ne, "aten::__not__": operator.not_,
    "aten::__and__": operator.and_, "aten::__or__": operator.or_, "aten::__xor__": operator.xor,
    "aten::__contains__": operator.contains, "aten::slice": _slice, "aten::pop": "{}.pop({})",
    "aten::copy": "{}.copy()", "aten::keys": "[*{}.keys()]", "aten::values": "[*{}.values()]",
    "aten::items": "[*{}.items()]", "aten::str": _text, "aten::format": format_text,
    "aten::__range_length": _range_length, "aten::__derive_index": _derive_index, "aten::ceil": math.ceil,
    "aten::floor": math.floor, "aten::sqrt": _sqrt, "aten::log": _log, "prim::min": _least, "prim::max": _most,
    "prim::abs": abs, "aten::any": any, "aten::all": all,
    "aten::is_grad_enabled": torch.is_grad_enabled,
    "aten::is_autocast_enabled": torch.is_autocast_enabled, "aten::is_autocast_cpu_enabled": _autocast_on_cpu,
    "aten::is_scripting": "True",
}  # fmt: skip
# They write messages, or do nothing.
WITHOUT_EFFECT = frozenset({"aten::warn", "prim::Print"})
