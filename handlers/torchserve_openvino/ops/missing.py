"""Decompositions of operators that OpenVINO lacks, or whose conversion is banned, into operators that it has.

torch's own tables have none for them, or one that ends in torch's primitives. Each returns NotImplemented where the
formula does not hold; the operator then stays whole and runs in eager PyTorch.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Number = int | float | bool

# A comparison of each value with each boundary takes memory for all of them.
_MOST_COMPARISONS = 2**24
# Rows of a pairwise distance are taken one by one.
_MOST_ROWS = 64


def _float(x: Tensor) -> Tensor:
    """As torch promotes integers where a function answers in floats."""
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


def _trunc(x: Tensor) -> Tensor:
    return torch.where(x < 0, x.ceil(), x.floor()) if x.is_floating_point() else x.clone()


def _exp2(x: Tensor) -> Tensor:
    return torch.pow(2.0, _float(x))


def _expm1(x: Tensor) -> Tensor:
    """2 tanh(x/2) / (1 - tanh(x/2)), exact for small values; the exponential itself for others."""
    x = _float(x)
    half = torch.tanh(x / 2)
    return torch.where(x.isnan() | (x.abs() < 1), 2 * half / (1 - half), torch.exp(x) - 1)


def _signbit(x: Tensor) -> Tensor:
    """1 / -0.0 is negative where -0.0 itself is not less than 0."""
    return (x < 0) | ((x == 0) & (1 / x < 0)) if x.is_floating_point() else x < 0


def _copysign(x: Tensor, y: Tensor | Number) -> Tensor:
    if not isinstance(y, Tensor):
        negative = math.copysign(1.0, y) < 0
        return -_float(x).abs() if negative else _float(x).abs()
    kind = torch.result_type(x, y)
    x = _float(x.to(kind) if kind.is_floating_point else x)
    # ``x`` comes first wherever both meet: the layout of the answer is that of the first.
    return x.abs() * torch.where(torch.signbit(y), -1.0, 1.0).to(x.dtype)


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    """Without squares that overflow."""
    a, b = x.abs(), y.abs()
    most, least = torch.where(a < b, b, a), torch.where(a < b, a, b)
    ratio = torch.where(most == 0, 0.0, least / most)
    found = most * torch.sqrt(1 + ratio * ratio)
    return torch.where(a.isinf() | b.isinf(), float("inf"), torch.where(a.isnan() | b.isnan(), a + b, found))


def _fmax(x: Tensor, y: Tensor) -> Tensor:
    if not torch.result_type(x, y).is_floating_point:
        return torch.maximum(x, y)
    return torch.where(x.isnan() | (x < y), y, x)


def _fmin(x: Tensor, y: Tensor) -> Tensor:
    if not torch.result_type(x, y).is_floating_point:
        return torch.minimum(x, y)
    return torch.where(x.isnan() | (x > y), y, x)


def _clamp(x: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    for bound in (min, max):
        if bound is not None:
            x = x.to(torch.result_type(x, bound))
    if min is not None:
        x = torch.maximum(x, min.to(x.dtype))
    return x if max is None else torch.minimum(x, max.to(x.dtype))


def _angle(x: Tensor) -> Tensor:
    if x.is_complex():
        return NotImplemented
    x = _float(x)
    return torch.where(x.isnan(), x, torch.where(x < 0, math.pi, 0.0).to(x.dtype))


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    """By quadrants; equal infinities count as 1, and the sign of a zero as that of a number."""
    kind = torch.result_type(y, x)
    kind = kind if kind.is_floating_point else torch.get_default_dtype()
    y, x = y.to(kind), x.to(kind)
    infinite = y.isinf() & x.isinf()
    quotient = torch.where(infinite, torch.sign(y) * torch.sign(x), y / x)
    base = torch.where((y == 0) & (x == 0), y, torch.atan(quotient))
    base = torch.where((y == 0) & torch.signbit(x), torch.zeros_like(base), base)
    half = torch.where(torch.signbit(y), -math.pi, math.pi).to(kind)
    behind = torch.signbit(x) & ~x.isnan()
    return base + half * behind.to(kind)


def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    kind = torch.result_type(x, y)
    if not kind.is_floating_point:
        return NotImplemented
    x, y = x.to(kind), y.to(kind)
    most, least = torch.where(x < y, y, x), torch.where(x < y, x, y)
    found = most + torch.log1p(torch.exp(least - most))
    return torch.where(x.isnan() | y.isnan(), x + y, torch.where(most.isinf(), most, found))


def _logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    if x.is_complex():
        return NotImplemented
    x = _float(x)
    if not x.dim():
        return x.clone()
    most = torch.amax(x, dim, True)
    safe = torch.where(most.isinf(), torch.zeros_like(most), most)
    total = torch.log(torch.sum(torch.exp(x - safe), dim, True)) + most.where(most.isnan(), safe)
    if keepdim:
        return total
    return total.squeeze(list(dim) or list(range(x.dim())))


def _bitwise(op: Any) -> Callable[..., Any]:
    """The overloads with a number."""

    def decomposed(x: Tensor, y: Number) -> Tensor:
        kind = torch.result_type(x, y)
        return op(x.to(kind), torch.full((), y, dtype=kind))

    return decomposed


def _sub(x: Tensor, y: Number, alpha: Number = 1) -> Tensor:
    return aten.sub.Tensor(x, y, alpha=alpha)


def _divide(x: Tensor, y: Number, *, rounding_mode: str | None = None) -> Tensor:
    return aten.div.Tensor_mode(x, y, rounding_mode=rounding_mode)


def _round(x: Tensor, *, decimals: int) -> Tensor:
    scale = 10.0 ** abs(decimals)
    if not x.is_floating_point():
        return NotImplemented
    return torch.round(x * scale) / scale if decimals >= 0 else torch.round(x / scale) * scale


def _empty(size: list[int], order: list[int], options: dict[str, Any]) -> Tensor:
    """Zeros, where another tensor has memory that nobody wrote to.

    Args:
        size: The shape.
        order: Dimensions from the outermost in memory to the innermost.
        options: What is asked for beside the shape.
    """
    if any(options.get(name) for name in ("device", "pin_memory", "layout")):
        return NotImplemented
    zeros = torch.zeros([size[dim] for dim in order], dtype=options.get("dtype"))
    return zeros.permute([order.index(dim) for dim in range(len(size))])


def _empty_strided(size: list[int], stride: list[int], **options: Any) -> Tensor:
    order = sorted(range(len(size)), key=lambda dim: -stride[dim])
    dense = [math.prod(size[dim] for dim in order[i + 1 :]) for i in range(len(order))]
    if [stride[dim] for dim in order] != dense:
        return NotImplemented
    return _empty(list(size), order, _on_cpu(options))


def _empty_permuted(size: list[int], physical_layout: list[int], **options: Any) -> Tensor:
    return _empty(list(size), list(physical_layout), _on_cpu(options))


def _on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    """Without what says the default."""
    defaults = {"device": torch.device("cpu"), "layout": torch.strided, "pin_memory": False}
    return {name: value for name, value in options.items() if value is not None and defaults.get(name) != value}


def _distance(difference: Tensor, p: float) -> Tensor:
    """The norm over the last dimension."""
    size = difference.abs()
    if p == 0:
        return (size != 0).to(size.dtype).sum(-1)
    if p == 1:
        return size.sum(-1)
    if p == 2:
        return (size * size).sum(-1).sqrt()
    if p == math.inf:
        return size.amax(-1)
    return size.pow(p).sum(-1).pow(1 / p)


def _cdist(x: Tensor, y: Tensor, p: float, compute_mode: int | None) -> Tensor:
    """By differences; for Euclidean distances of many rows by a product of matrices, as torch does."""
    rows = (x.shape[-2], y.shape[-2])
    if p == 2 and (compute_mode == 1 or (compute_mode in {None, 0} and max(rows) > 25)):
        x_square, y_square = (x * x).sum(-1, keepdim=True), (y * y).sum(-1, keepdim=True)
        left = torch.cat([-2 * x, x_square, torch.ones_like(x_square)], -1)
        right = torch.cat([y, torch.ones_like(y_square), y_square], -1)
        return (left @ right.transpose(-2, -1)).clamp_min(0).sqrt()
    if math.prod(rows) * math.prod(x.shape[:-2]) * x.shape[-1] > _MOST_COMPARISONS:
        return NotImplemented
    return _distance(x.unsqueeze(-2) - y.unsqueeze(-3), p)


def _pdist(x: Tensor, p: float = 2) -> Tensor:
    if x.shape[0] > _MOST_ROWS:
        return NotImplemented
    if x.shape[0] < 2:
        return x.new_zeros([0])
    pairs = [_distance(x[i] - x[i + 1 :], p) for i in range(x.shape[0] - 1)]
    return torch.cat(pairs)


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
    if x.numel() * boundaries.shape[-1] > _MOST_COMPARISONS:
        return NotImplemented
    if sorter is not None:
        boundaries = torch.gather(boundaries, -1, sorter)
    values, bounds = x.unsqueeze(-1), boundaries if boundaries.dim() == 1 else boundaries.unsqueeze(-2)
    above = values < bounds if right or side == "right" else values <= bounds
    found = torch.sum(torch.logical_not(above).to(torch.int32), -1)
    return found.to(torch.int32 if out_int32 else torch.int64)


def _bucketize(x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)


def _index_fill(x: Tensor, dim: int, index: Tensor, value: Number) -> Tensor:
    if not x.dim():
        return NotImplemented
    size = x.shape[dim]
    places = torch.arange(size, dtype=index.dtype)
    # The look-up counts from the end where the index is below 0, and keeps the check that it is not beyond it.
    chosen = (places[index.reshape(-1)].unsqueeze(1) == places).any(0)
    shape = [1] * x.dim()
    shape[dim] = size
    return torch.where(chosen.reshape(shape), torch.full((), value, dtype=x.dtype), x)


def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Number = 1) -> Tensor:
    if not x.dim() or not x.is_floating_point():
        return NotImplemented
    shape = [1] * x.dim()
    shape[dim] = -1
    scaled = source if alpha == 1 else source * alpha
    return torch.scatter_add(x, dim, index.to(torch.int64).reshape(shape).expand(source.shape), scaled)


def _addbmm(x: Tensor, left: Tensor, right: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """One product of all batches side by side."""
    if not x.is_floating_point():
        return NotImplemented
    batch, rows, inner = left.shape
    wide = left.transpose(0, 1).reshape(rows, batch * inner)
    return torch.addmm(x, wide, right.reshape(batch * inner, right.shape[2]), beta=beta, alpha=alpha)


MISSING: dict[Any, Callable[..., Any]] = {
    aten.trunc.default: _trunc,
    aten.exp2.default: _exp2,
    aten.expm1.default: _expm1,
    aten.signbit.default: _signbit,
    aten.copysign.Tensor: _copysign,
    aten.copysign.Scalar: _copysign,
    aten.hypot.default: _hypot,
    aten.fmax.default: _fmax,
    aten.fmin.default: _fmin,
    aten.clamp.Tensor: _clamp,
    aten.angle.default: _angle,
    aten.atan2.default: _atan2,
    aten.logaddexp.default: _logaddexp,
    aten.logsumexp.default: _logsumexp,
    aten.bitwise_or.Scalar: _bitwise(torch.bitwise_or),
    aten.bitwise_xor.Scalar: _bitwise(torch.bitwise_xor),
    aten.sub.Scalar: _sub,
    aten.div.Scalar_mode: _divide,
    aten.round.decimals: _round,
    aten.empty_strided.default: _empty_strided,
    aten.empty_permuted.default: _empty_permuted,
    aten._cdist_forward.default: _cdist,
    aten._pdist_forward.default: _pdist,
    aten.searchsorted.Tensor: _searchsorted,
    aten.bucketize.Tensor: _bucketize,
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_add.default: _index_add,
    aten.addbmm.default: _addbmm,
}
