"""Operators on truth values: comparisons, logical operators, and boolean reductions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchserve_openvino.ops import value_range
from torchserve_openvino.ops.names import packets
from torchserve_openvino.ops.rule_registry import INSTEAD, SHAPE, Movement, Rule, declare, decomposition

aten = torch.ops.aten
Dims = list[int] | None

declare(Rule(movement=Movement.COMPARES, range=value_range.truth), *packets("eq ne lt le gt ge"))
declare(Rule(movement=Movement.SELECTS, range=value_range.truth), *packets("logical_and logical_or logical_not"))
declare(Rule(range=value_range.truth), *packets("logical_xor any all isnan isinf isfinite"))
declare(Rule(movement=Movement.SELECTS, range=value_range.of_arguments(1, 2)), aten.where)
declare(Rule(banned=SHAPE), aten.where.default)
declare(Rule(range=value_range.of_arguments(0, 2)), aten.masked_fill)
declare(Rule(verified=True), aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default)


def truth(x: Tensor) -> Tensor:
    """Returns which elements are not 0, NaN included."""
    return x if x.dtype is torch.bool else x.ne(0)


def _logical(op: Any) -> Callable[..., Any]:
    """Converts the operands to booleans first, since OpenVINO takes NaN for False."""

    def decomposed(x: Tensor, y: Tensor) -> Tensor:
        if x.dtype is torch.bool and y.dtype is torch.bool:
            return NotImplemented
        return op(truth(x), truth(y))

    return decomposed


for _packet in (torch.logical_and, torch.logical_or, torch.logical_xor):
    declare(Rule(decompose=_logical(_packet)), getattr(aten, _packet.__name__).default)


@decomposition(aten.logical_not.default)
def _logical_not(x: Tensor) -> Tensor:
    return NotImplemented if x.dtype is torch.bool else x.eq(0)


def any_over(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """Computes ``any`` over several dimensions; over all if none is given."""
    for dim in sorted((d % max(x.dim(), 1) for d in dims or range(x.dim())), reverse=True):
        x = torch.any(x, dim, keepdim)
    return x


def all_over(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """Computes ``all`` over several dimensions; over all if none is given."""
    return ~any_over(~x, dims, keepdim)


def _as_truth_of(x: Tensor, result: Tensor) -> Tensor:
    """Returns a boolean result in the dtype of `any` and `all`, which is uint8 for uint8."""
    return result.to(torch.uint8) if x.dtype is torch.uint8 else result


@decomposition(aten.any.dims, rule=Rule(banned="OpenVINO takes NaN for False, and fails without dimensions" + INSTEAD))
def _any_dims(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    dims = [] if dim is None else list(dim)
    return _as_truth_of(x, any_over(truth(x), dims, keepdim) if dim != [] else truth(x))


def _of_truth(reduce: Any) -> Callable[..., Any]:
    """Converts the input to booleans first, since OpenVINO takes a scalar NaN for False."""

    def decomposed(x: Tensor, *where: Any) -> Tensor:
        return NotImplemented if x.dtype is torch.bool else _as_truth_of(x, reduce(truth(x), *where))

    return decomposed


declare(Rule(decompose=_of_truth(torch.any)), aten.any.default, aten.any.dim)
declare(Rule(decompose=_of_truth(torch.all)), aten.all.default)


@decomposition(aten.isnan.default, aten.isinf.default)
def _never(x: Tensor) -> Tensor:
    """Returns False for integers, for which isnan and isinf fail in OpenVINO."""
    return NotImplemented if x.is_floating_point() or x.is_complex() else torch.zeros_like(x, dtype=torch.bool)
