"""Sorting, k-th values and medians, and searches in sorted values."""

import math

import torch
from torch import Tensor
from torch.fx import Node

from torchserve_openvino.ops import integers, value_range
from torchserve_openvino.ops.memory_order import example_of
from torchserve_openvino.ops.names import arguments_of, first_input
from torchserve_openvino.ops.rule_registry import FAILS, INSTEAD, Check, Lifted, Rule, declare, decomposition

aten = torch.ops.aten
# Comparing each value with each boundary takes memory for all pairs.
MOST_COMPARISONS = 2**24
# OpenVINO sorts stably by comparing all pairs of a row, 4 ns for each, or 16 rows at once if these lie side by side:
# with more pairs it takes longer than a call of eager PyTorch, in the end hundreds of times as long.
_MOST_PAIRS = 2**18
# For many of the largest values, it takes two to three times as long as eager PyTorch.
_MANY, _MANY_OF = 512, 2**14
# For few of them it passes over a long row once for each, and is up to 40 times slower than for 8.
_FEW, _LONG = 8, 2048

declare(
    Rule(
        check=Check.NO_NAN,
        integers=integers.value_or_place,
        item_ranges=(value_range.of_argument(0), value_range.positions(-1)),
    ),
    aten.sort, aten.topk,
)  # fmt: skip
declare(Rule(scalars=Lifted()), aten.topk.default)


def _is_slow_to_sort(x: Tensor, dim: int) -> bool:
    if not x.dim():
        return False
    sizes = [example_of(size) for size in x.shape]
    beside = math.prod(sizes[dim % x.dim() + 1 :])
    return math.prod(sizes) * sizes[dim] > _MOST_PAIRS * min(beside, 16)


def _slower_sort(node: Node) -> str | None:
    """Refuses what is slower in OpenVINO, and scalars."""
    source = first_input(node)
    if source is None or not source.dim():
        return _of_scalar(node)
    if _is_slow_to_sort(source, arguments_of(node).get("dim", -1)):
        return f"sorting {list(source.shape)} is slower in OpenVINO, which compares all pairs, than in eager PyTorch"
    return None


def _slower_topk(node: Node) -> str | None:
    source, count = first_input(node), arguments_of(node).get("k", 0)
    size = math.prod(example_of(size) for size in source.shape) if source is not None else 0
    if isinstance(count, int) and count > _MANY and size > _MANY_OF:
        return f"the {count} largest of {size} values: slower in OpenVINO than in eager PyTorch"
    return None


@decomposition(aten.topk.default, rule=Rule(limit=_slower_topk))
def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Looks for 8 values where fewer take longer."""
    if not isinstance(k, int) or k >= _FEW or not x.dim() or example_of(x.shape[dim]) < _LONG:
        return NotImplemented
    values, places = torch.topk(x, _FEW, dim, largest, True)
    return torch.narrow_copy(values, dim, 0, k), torch.narrow_copy(places, dim, 0, k)


@decomposition(aten.sort.default, rule=Rule(limit=_slower_sort))
def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Sorts stably: OpenVINO orders equal values arbitrarily, torch's CPU sort is stable even if it need not be."""
    if _is_slow_to_sort(x, dim):
        return NotImplemented
    return aten.sort.stable(x, stable=True, dim=dim, descending=descending)


def _of_scalar(node: Node) -> str | None:
    source = first_input(node)
    return "sorting a scalar fails in OpenVINO" if source is not None and source.dim() == 0 else None


@decomposition(aten.sort.stable, rule=Rule(verified=True, limit=_slower_sort, scalars=Lifted()))
def _sort_stable(x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    if stable or _is_slow_to_sort(x, dim):
        return NotImplemented
    return aten.sort.stable(x, stable=True, dim=dim, descending=descending)


@decomposition(aten.kthvalue.default, rule=Rule(banned="OpenVINO converts kthvalue to another shape than torch's"))
def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the k-th of the sorted values, counted from 1."""
    if not x.dim() or _is_slow_to_sort(x, dim):
        return NotImplemented
    ordered = aten.sort.stable(x, stable=True, dim=dim, descending=False)
    # Not a view of the sorted values: eager's result is not a view either.
    values, places = (torch.narrow_copy(tensor, dim, k - 1, 1) for tensor in ordered)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


@decomposition(aten.median.dim)
def _median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the lower of the two values in the middle, or the first NaN if there is one."""
    if not x.dim() or not isinstance(x.shape[dim], int) or _is_slow_to_sort(x, dim):
        return NotImplemented
    values, places = _kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)
    if x.is_floating_point():
        nan = x.isnan()
        some = nan.any(dim, keepdim)
        values = torch.where(some, math.nan, values)
        places = torch.where(some, nan.to(torch.int32).argmax(dim, keepdim), places)
    return values, places


@decomposition(aten.median.default)
def _median_of_all(x: Tensor) -> Tensor:
    if not all(isinstance(size, int) for size in x.shape) or not x.numel() or x.numel() ** 2 > _MOST_PAIRS:
        return NotImplemented
    return _median(x.reshape(-1), 0)[0]


@decomposition(aten.searchsorted.Tensor, rule=Rule(banned=FAILS + INSTEAD))
def _searchsorted(
    boundaries: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Counts the boundaries below each value; NaN lies above all of them."""
    if x.numel() * boundaries.shape[-1] > MOST_COMPARISONS:
        return NotImplemented
    if sorter is not None:
        boundaries = torch.gather(boundaries, -1, sorter)
    values, bounds = x.unsqueeze(-1), boundaries if boundaries.dim() == 1 else boundaries.unsqueeze(-2)
    above = values < bounds if right or side == "right" else values <= bounds
    result = torch.sum(torch.logical_not(above).to(torch.int32), -1)
    return result.to(torch.int32 if out_int32 else torch.int64)


@decomposition(
    aten.bucketize.Tensor,
    rule=Rule(banned="OpenVINO puts NaN into the first bucket, torch into the last" + INSTEAD),
)
def _bucketize(x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)
