"""Decompositions that go around conversions of OpenVINO 2026.4 which give other answers than torch.

Each returns NotImplemented where the conversion is right, so that the operator stays whole there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Dims = list[int] | None


def _abs(x: Tensor) -> Tensor:
    """OpenVINO drops the abs of an integer range (tests/contract pins it); the maximum with the negative is right."""
    if x.is_floating_point() or x.is_complex():
        return NotImplemented
    return torch.maximum(x, -x)


def _var_mean(x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """OpenVINO takes a missing correction for 0, torch for 1."""
    if correction is not None:
        return NotImplemented
    return torch.var_mean(x, dim, correction=1, keepdim=keepdim)


def _var(x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    if correction is not None:
        return NotImplemented
    return torch.var(x, dim, correction=1, keepdim=keepdim)


def _std(x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    if correction is not None:
        return NotImplemented
    return torch.std(x, dim, correction=1, keepdim=keepdim)


def _floor_divide(x: Tensor, y: Any, *, rounding_mode: str | None = None) -> Tensor:
    """OpenVINO rounds an integer quotient towards 0 where torch was asked for the floor."""
    floats = x.is_floating_point() or (y.is_floating_point() if isinstance(y, Tensor) else isinstance(y, float))
    if rounding_mode != "floor" or floats:
        return NotImplemented
    return torch.div(x - torch.remainder(x, y), y, rounding_mode="trunc")


REPAIRS: dict[Any, Callable[..., Any]] = {
    aten.abs.default: _abs,
    aten.div.Tensor_mode: _floor_divide,
    aten.var_mean.correction: _var_mean,
    aten.var.correction: _var,
    aten.std.correction: _std,
}
