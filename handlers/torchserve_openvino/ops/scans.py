"""Decompositions along one dimension: sums, running sums, and the k-th of an order.

`cumprod` is not among them: a product in another order than eager's overflows where eager's does not.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """OpenVINO sums in the type that it is given; torch sums integers and booleans as int64."""
    kind = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    if kind is x.dtype:
        return NotImplemented
    # Named again: of int32 without it torch's result would be int64.
    return aten.cumsum.default(x.to(kind), dim, dtype=kind)


def _sum(x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Through TorchScript OpenVINO casts the sum; torch casts what is summed."""
    if dtype is None or dtype is x.dtype:
        return NotImplemented
    return aten.sum.dim_IntList(x.to(dtype), dim, keepdim, dtype=dtype)


def _sum_of_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return NotImplemented if dtype is None or dtype is x.dtype else aten.sum.default(x.to(dtype), dtype=dtype)


def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The k-th of the sorted values, counted from 1."""
    if not x.dim():
        return NotImplemented
    ordered = aten.sort.stable(x, stable=True, dim=dim, descending=False)
    # Not a view of the sorted values: eager's answer is no view either.
    values, places = (torch.narrow_copy(each, dim, k - 1, 1) for each in ordered)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower of the two in the middle; the first NaN where there is one."""
    if not x.dim() or not isinstance(x.shape[dim], int):
        return NotImplemented
    values, places = _kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)
    if x.is_floating_point():
        nan = x.isnan()
        some = nan.any(dim, keepdim)
        values = torch.where(some, math.nan, values)
        places = torch.where(some, nan.to(torch.int32).argmax(dim, keepdim), places)
    return values, places


def _median_of_all(x: Tensor) -> Tensor:
    if not all(isinstance(size, int) for size in x.shape) or not x.numel():
        return NotImplemented
    return _median(x.reshape(-1), 0)[0]


SCANS: dict[Any, Callable[..., Any]] = {
    aten.cumsum.default: _cumsum,
    aten.kthvalue.default: _kthvalue,
    aten.median.dim: _median,
    aten.median.default: _median_of_all,
}
# Where OpenVINO's frontend has rules of its own for them, as through TorchScript.
FOREIGN_SCANS: dict[Any, Callable[..., Any]] = {
    aten.sum.default: _sum_of_all,
    aten.sum.dim_IntList: _sum,
}
