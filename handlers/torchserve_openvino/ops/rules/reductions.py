"""Sums, extremes, norms and moments along dimensions, and running values."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from torchserve_openvino.ops import integers, value_range
from torchserve_openvino.ops.names import packets
from torchserve_openvino.ops.rule_registry import INSTEAD, Check, Lifted, Rule, TracedCall, declare, decomposition, once
from torchserve_openvino.ops.rules.elementwise import as_floats
from torchserve_openvino.ops.rules.logic import all_over, any_over

aten = torch.ops.aten
Dims = list[int] | None

declare(Rule(multiplies=True, check=Check.ANY_ORDER), aten.prod)
declare(
    Rule(multiplies=True, banned="its numbers must be floats, in rows of a known length of at most 1024"), aten.cumprod
)
declare(Rule(scalars=Lifted()), aten.prod.dim_int, aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim)
declare(Rule(scalars=Lifted()), aten.argmax.default, aten.argmin.default, aten.cumsum.default)
declare(Rule(integers=integers.total), aten.sum, aten.cumsum)
declare(Rule(adds=True), *packets("sum mean var std var_mean std_mean linalg_vector_norm nansum cumsum"))
declare(Rule(integers=integers.place, range=value_range.positions(None)), *packets("argmax argmin argsort"))
declare(Rule(check=Check.NO_NAN), aten.argmax)
declare(
    Rule(
        integers=integers.value_or_place,
        item_ranges=(value_range.of_argument(0), value_range.positions(-1)),
    ),
    *packets("max min"),
)


# --- sums and moments ---------------------------------------------------------------------------------------------


@decomposition(aten.cumsum.default)
def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Casts the input: OpenVINO sums in the input's dtype, torch sums integers and booleans as int64."""
    kind = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    if kind is x.dtype:
        return NotImplemented
    # The dtype is passed again: without it, torch's result for int32 would be int64.
    return aten.cumsum.default(x.to(kind), dim, dtype=kind)


def _sum(x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Casts the input, as torch does; through TorchScript, OpenVINO casts the sum instead."""
    if dtype is None or dtype is x.dtype:
        return NotImplemented
    return aten.sum.dim_IntList(x.to(dtype), dim, keepdim, dtype=dtype)


def _sum_of_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return NotImplemented if dtype is None or dtype is x.dtype else aten.sum.default(x.to(dtype), dtype=dtype)


def _traced_sum(x: Any, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Lists all dimensions if none is given; the TorchScript frontend would sum over none."""
    return torch.sum(x, dims or list(range(x.dim())), keepdim, dtype=dtype)


def _sum_of_floats_as_integers(
    x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Casts floats by an operator of its own, whose values are checked: OpenVINO adds floats, and casts the sum."""
    if dtype is None or dtype.is_floating_point or not x.is_floating_point():
        return NotImplemented
    return _sum(x, dim, keepdim, dtype=dtype)


def _sum_over_no_dimensions(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return aten.sum.dim_IntList(x, [], dtype=dtype)


declare(
    Rule(decompose=_sum_of_floats_as_integers, decompose_traced=_sum, traced=TracedCall("sum", _traced_sum)),
    aten.sum.dim_IntList,
)
declare(
    Rule(decompose=_sum_over_no_dimensions, decompose_traced=_sum_of_all, traced=TracedCall("sum", _traced_sum)),
    aten.sum.default,
)


def _fraction(node: Node) -> str | None:
    """Refuses a correction that is no whole number, which OpenVINO would make one; of known sizes none is left."""
    correction = node.kwargs.get("correction")
    return "a correction that is no whole number" if isinstance(correction, float) and correction % 1 else None


declare(Rule(limit=_fraction), aten.var_mean.correction, aten.var.correction, aten.std.correction)


def _variance(x: Tensor, dim: Dims, correction: Any, keepdim: bool) -> Tensor:
    """Computes the variance: OpenVINO supports only corrections of 0 and 1, and takes None for 0, torch for 1."""
    correction = 1 if correction is None else correction
    if not x.is_floating_point() or (type(correction) is int and correction in {0, 1}):
        return NotImplemented
    dims = [d % max(x.dim(), 1) for d in dim] if dim else list(range(x.dim()))
    count = math.prod(x.shape[d] for d in dims) if x.dim() else 1
    centered = x - x.mean(dims, keepdim=True)
    total = (centered * centered).sum(dims, keepdim)
    if not isinstance(count, int):
        # Symbolic: the operator stays whole, and divides at run time, where the size is known.
        return NotImplemented
    left = max(0.0, count - correction)
    return total / left if left else total * math.inf


@decomposition(aten.var_mean.correction)
def _var_mean(x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if correction is None:
        return torch.var_mean(x, dim, correction=1, keepdim=keepdim)
    variance = _variance(x, dim, correction, keepdim)
    return NotImplemented if variance is NotImplemented else (variance, x.mean(dim, keepdim))


@decomposition(aten.var.correction)
def _var(x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    if correction is None:
        return torch.var(x, dim, correction=1, keepdim=keepdim)
    return _variance(x, dim, correction, keepdim)


@decomposition(aten.std.correction)
def _std(x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    if correction is None:
        return torch.std(x, dim, correction=1, keepdim=keepdim)
    variance = _variance(x, dim, correction, keepdim)
    return NotImplemented if variance is NotImplemented else variance.sqrt()


@decomposition(
    aten.logsumexp.default, rule=Rule(banned="OpenVINO's loses NaN, and computes integers in integers" + INSTEAD)
)
def _logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    if x.is_complex():
        return NotImplemented
    x = as_floats(x)
    if not x.dim():
        return x.clone()
    most = torch.amax(x, dim, True)
    safe = torch.where(most.isinf(), torch.zeros_like(most), most)
    total = torch.log(torch.sum(torch.exp(x - safe), dim, True)) + most.where(most.isnan(), safe)
    if keepdim:
        return total
    return total.squeeze(list(dim) or list(range(x.dim())))


@decomposition(aten.linalg_vector_norm.default)
def _vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Handles what OpenVINO does not: omitted dimensions, counts of nonzero values, large single values (overflow)."""
    if x.is_complex():
        return NotImplemented
    dims = list(dim) if dim and x.dim() else list(range(x.dim()))
    single = all(isinstance(x.shape[d], int) and x.shape[d] == 1 for d in dims)
    # Eager takes the absolute value of a single value as well, but not of a scalar whose dimension is given.
    if dim and ord != 0 and abs(ord) != math.inf and not (single and x.dim()):
        return NotImplemented
    x = x if dtype is None else x.to(dtype)
    if ord == 0:
        return x.ne(0).to(x.dtype).sum(dims, keepdim) if x.dim() else x.ne(0).to(x.dtype)
    if single:
        return x.abs() if keepdim or not x.dim() else x.abs().squeeze(dims)
    if abs(ord) == math.inf:
        # OpenVINO's drops NaN.
        return (torch.amax if ord > 0 else torch.amin)(x.abs(), dims, keepdim)
    return torch.linalg.vector_norm(x, ord, dims, keepdim)


# --- the largest and the least ------------------------------------------------------------------------------------


def _extreme(reduce: Any, worst: float, boolean: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[..., Any]:
    """Handles NaN, infinities and booleans: OpenVINO's reductions ignore the former and do not accept the latter."""

    def decomposed(x: Tensor, dim: list[int] | tuple[int, ...] = (), keepdim: bool = False) -> Tensor:
        dims = list(dim)
        if x.dtype is torch.bool:
            return boolean(x, dims, keepdim)
        if not x.is_floating_point():
            return NotImplemented
        result = torch.where(any_over(x != worst, dims, keepdim), reduce(x, dims, keepdim), worst)
        return torch.where(any_over(x.isnan(), dims, keepdim), float("nan"), result)

    return once(decomposed)


declare(Rule(decompose=_extreme(torch.amax, -math.inf, any_over)), aten.amax.default)
declare(Rule(decompose=_extreme(torch.amin, math.inf, all_over)), aten.amin.default)


def _whole(reduce: Any) -> Callable[..., Any]:
    def decomposed(x: Tensor) -> Tensor:
        return reduce(x, [], False)

    return decomposed


declare(Rule(decompose=_whole(torch.amax)), aten.max.default)
declare(Rule(decompose=_whole(torch.amin)), aten.min.default)


# Types whose values are cast before they are compared.
_COMPARED_AS_INT32 = frozenset({torch.bool, torch.uint8, torch.int8})


def _with_index(reduce: Any, position: Any) -> Callable[..., Any]:
    """Takes the index from argmax or argmin: among equal values OpenVINO returns any index, torch the first."""

    def decomposed(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        narrow = x.dtype in _COMPARED_AS_INT32
        result = x.to(torch.int32) if narrow else x
        values, indices = reduce(result, [dim], keepdim), position(result, dim, keepdim)
        return (values.to(x.dtype) if narrow else values), indices

    return decomposed


declare(Rule(decompose=_with_index(torch.amax, torch.argmax)), aten.max.dim)
declare(Rule(decompose=_with_index(torch.amin, torch.argmin)), aten.min.dim)


@decomposition(aten.argmin.default)
@once
def _argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Returns the position of a NaN, which torch takes for the least value; OpenVINO's argmin ignores it."""
    if not x.is_floating_point():
        return NotImplemented
    nans = x.isnan()
    has_nan = torch.any(nans) if dim is None else torch.any(nans, dim, keepdim)
    return torch.where(has_nan, torch.argmax(nans.to(torch.int32), dim, keepdim), torch.argmin(x, dim, keepdim))


# --- running products and extremes --------------------------------------------------------------------------------


def _doubled(parts: tuple[Tensor, ...], dim: int, merge: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Computes a running value in as many steps as the logarithm of its length (Hillis and Steele, 1986).

    Args:
        parts: Tensors of one shape, which `merge` takes together.
        dim: The dimension along which they run; its size is known.
        merge: Returns the parts of two neighboring stretches; takes those of the first, then those of the second.
    """
    size, reach = parts[0].shape[dim], 1
    while reach < size:
        before = [part.narrow(dim, 0, size - reach) for part in parts]
        here = [part.narrow(dim, reach, size - reach) for part in parts]
        merged = merge(*before, *here)
        parts = tuple(
            torch.cat([part.narrow(dim, 0, reach), new], dim) for part, new in zip(parts, merged, strict=True)
        )
        reach *= 2
    return parts


def _runs(x: Tensor, dim: int) -> bool:
    return not x.is_complex() and x.dim() > 0 and isinstance(x.shape[dim], int) and x.shape[dim] > 0


# torch multiplies in float64, OpenVINO in float32, whose rounding has a bias next to 1: 6e-6 for 1,000 factors.
_MOST_FACTORS = 1024
_OF_KNOWN_LENGTH = "the length of its rows must be known"


@decomposition(aten.cumprod.default)
def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Takes the last product from `prod`, whose check makes sure that any order of the factors is right."""
    x = x if dtype is None else x.to(dtype)
    if not _runs(x, dim) or not x.is_floating_point() or x.shape[dim] > _MOST_FACTORS:
        return NotImplemented
    (products,) = _doubled((x,), dim, lambda before, here: (before * here,))
    return torch.cat([products.narrow(dim, 0, x.shape[dim] - 1), x.prod(dim, True)], dim)


@decomposition(aten.logcumsumexp.default, rule=Rule(banned=_OF_KNOWN_LENGTH))
def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    if not _runs(x, dim) or not x.is_floating_point():
        return NotImplemented
    (sums,) = _doubled((x,), dim, lambda before, here: (torch.logaddexp(before, here),))
    return sums.clone() if sums is x else sums


def _running_extreme(exceeds: Any) -> Callable[..., Any]:
    """Makes the decomposition of a running extreme and its position: of equal values, or NaN, the last one's."""

    def merge(before: Tensor, its_place: Tensor, here: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        keeps = exceeds(before, here)
        if before.is_floating_point():
            keeps = (keeps | before.isnan()) & here.isnan().logical_not()
        return torch.where(keeps, before, here), torch.where(keeps, its_place, index)

    def decomposed(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        if not _runs(x, dim):
            return NotImplemented
        narrow = x.dtype in _COMPARED_AS_INT32
        wide = x.to(torch.int32) if narrow else x
        shape = [1] * x.dim()
        shape[dim] = x.shape[dim]
        places = torch.arange(x.shape[dim], device=x.device).reshape(shape).expand(x.shape).contiguous()
        values, indices = _doubled((wide, places), dim, merge)
        values = values.clone() if values is x else values
        return (values.to(x.dtype) if narrow else values), indices

    return decomposed


declare(Rule(decompose=_running_extreme(torch.gt), banned=_OF_KNOWN_LENGTH), aten.cummax.default)
declare(Rule(decompose=_running_extreme(torch.lt), banned=_OF_KNOWN_LENGTH), aten.cummin.default)
