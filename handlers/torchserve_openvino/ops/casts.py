"""Casts and copies that OpenVINO computes otherwise than torch does."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_WIDE_INTEGERS = frozenset({torch.int16, torch.int32, torch.int64})
_NARROW_FLOATS = frozenset({torch.float16, torch.bfloat16})


def _rounded(x: Tensor) -> Tensor:
    """float32 rounded to the 8 bits that bfloat16 has, so that nothing is left to cut off.

    Veltkamp's splitting: T. J. Dekker, "A floating-point technique for extending the available precision", 1971.
    """
    wide = x * 65537.0
    return wide - (wide - x)


def _to_copy(x: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **rest: Any) -> Tensor:
    """OpenVINO takes the NaN of a scalar for False, and cuts integers off where a narrow float would be rounded."""
    if device not in {None, x.device}:
        return NotImplemented
    if dtype is torch.bool and x.is_floating_point():
        found = x.ne(0)
    elif dtype in _NARROW_FLOATS and x.dtype in _WIDE_INTEGERS:
        # As torch does it: https://github.com/pytorch/pytorch/blob/main/c10/util/Half.h, by way of float.
        found = _rounded(x.to(torch.float32)).to(dtype) if dtype is torch.bfloat16 else x.to(torch.float32).to(dtype)
    else:
        return NotImplemented
    layout = rest.get("memory_format") or torch.preserve_format
    return found if layout is torch.preserve_format else found.contiguous(memory_format=layout)


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """OpenVINO's compilation of a copied number that nothing else is computed with ends the process."""
    if x.dim() or source.dim():
        return NotImplemented
    return source.clone() if source.dtype is x.dtype else source.to(x.dtype)


CASTS: dict[Any, Callable[..., Any]] = {aten._to_copy.default: _to_copy, aten.copy.default: _copy}
