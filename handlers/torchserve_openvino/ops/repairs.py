"""Decompositions that go around conversions of OpenVINO 2026.4 which give other answers than torch, or fail.

Each returns NotImplemented where the conversion is right, so that the operator stays whole there.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchserve_openvino.ops.division import floor_divide
from torchserve_openvino.ops.once import once

aten = torch.ops.aten
Dims = list[int] | None


def _abs(x: Tensor) -> Tensor:
    """OpenVINO drops the abs of an integer range (tests/contract pins it); the maximum with the negative is right."""
    if x.is_floating_point() or x.is_complex():
        return NotImplemented
    return torch.maximum(x, -x)


def _variance(x: Tensor, dim: Dims, correction: Any, keepdim: bool) -> Tensor:
    """OpenVINO takes a missing correction for 0, torch for 1, and knows no other numbers."""
    correction = 1 if correction is None else correction
    if not x.is_floating_point() or (type(correction) is int and correction in {0, 1}):
        return NotImplemented
    dims = [d % max(x.dim(), 1) for d in dim] if dim else list(range(x.dim()))
    count = math.prod(x.shape[d] for d in dims) if x.dim() else 1
    centred = x - x.mean(dims, keepdim=True)
    total = (centred * centred).sum(dims, keepdim)
    if not isinstance(count, int):
        # Symbolic: the sum is divided where the size is known, at run time.
        return NotImplemented
    left = max(0.0, count - correction)
    return total / left if left else total * math.inf


def _var_mean(x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if correction is None:
        return torch.var_mean(x, dim, correction=1, keepdim=keepdim)
    found = _variance(x, dim, correction, keepdim)
    return NotImplemented if found is NotImplemented else (found, x.mean(dim, keepdim))


def _var(x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    if correction is None:
        return torch.var(x, dim, correction=1, keepdim=keepdim)
    return _variance(x, dim, correction, keepdim)


def _std(x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    if correction is None:
        return torch.std(x, dim, correction=1, keepdim=keepdim)
    found = _variance(x, dim, correction, keepdim)
    return NotImplemented if found is NotImplemented else found.sqrt()


def _divide(x: Any, y: Any, *, rounding_mode: str | None = None) -> Tensor:
    """OpenVINO rounds an integer quotient towards 0 where the floor was asked for, and truncates floats to 32 bits."""
    if not isinstance(x, Tensor):
        # Of two numbers, as Python wrote them.
        return NotImplemented
    floats = x.is_floating_point() or (y.is_floating_point() if isinstance(y, Tensor) else isinstance(y, float))
    if rounding_mode == "trunc" and floats:
        return torch.trunc(torch.div(x, y))
    if rounding_mode == "floor" and floats:
        return floor_divide(x, y)
    if rounding_mode != "floor":
        return NotImplemented
    return torch.div(x - torch.remainder(x, y), y, rounding_mode="trunc")


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """OpenVINO orders equal values at random; torch's CPU sort keeps their order even where it need not."""
    return aten.sort.stable(x, stable=True, dim=dim, descending=descending)


def _sort_stable(x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    if stable:
        return NotImplemented
    return aten.sort.stable(x, stable=True, dim=dim, descending=descending)


# --- the largest and the least ------------------------------------------------------------------------------------


def _all_dims(x: Tensor, dims: list[int]) -> list[int]:
    return dims or list(range(x.dim()))


def _any_over(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    for dim in sorted((d % max(x.dim(), 1) for d in _all_dims(x, dims)), reverse=True):
        x = torch.any(x, dim, keepdim)
    return x


def _extreme(reduce: Any, worst: float, boolean: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[..., Any]:
    """OpenVINO's reductions pass over NaN and infinities, and do not take booleans."""

    def decomposed(x: Tensor, dim: list[int] | tuple[int, ...] = (), keepdim: bool = False) -> Tensor:
        dims = list(dim)
        if x.dtype is torch.bool:
            return boolean(x, dims, keepdim)
        if not x.is_floating_point():
            return NotImplemented
        found = torch.where(_any_over(x != worst, dims, keepdim), reduce(x, dims, keepdim), worst)
        return torch.where(_any_over(x.isnan(), dims, keepdim), float("nan"), found)

    return once(decomposed)


def _all_over(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return ~_any_over(~x, dims, keepdim)


def _whole(reduce: Any) -> Callable[..., Any]:
    def decomposed(x: Tensor) -> Tensor:
        return reduce(x, [], False)

    return decomposed


def _with_index(reduce: Any, position: Any) -> Callable[..., Any]:
    """OpenVINO names any of several equal values, torch the first."""

    def decomposed(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        narrow = x.dtype in {torch.bool, torch.uint8, torch.int8}
        found = x.to(torch.int32) if narrow else x
        values, indices = reduce(found, [dim], keepdim), position(found, dim, keepdim)
        return (values.to(x.dtype) if narrow else values), indices

    return decomposed


def _argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """For torch NaN is the least value as well as the largest; OpenVINO's argmin passes over it."""
    if not x.is_floating_point():
        return NotImplemented
    nans = x.isnan()
    found = torch.any(nans) if dim is None else torch.any(nans, dim, keepdim)
    return torch.where(found, torch.argmax(nans.to(torch.int32), dim, keepdim), torch.argmin(x, dim, keepdim))


def _binary_extreme(boolean: Any) -> Callable[..., Any]:
    def decomposed(x: Tensor, y: Tensor) -> Tensor:
        return boolean(x, y) if x.dtype is torch.bool and y.dtype is torch.bool else NotImplemented

    return decomposed


def _vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """OpenVINO wants the dimensions named, cannot count nonzero values, and overflows for a large single one."""
    if x.is_complex():
        return NotImplemented
    dims = list(dim) if dim and x.dim() else list(range(x.dim()))
    single = all(isinstance(x.shape[d], int) and x.shape[d] == 1 for d in dims)
    # Eager takes the absolute value of a single one as well, but not of a scalar whose dimension is named.
    if dim and ord != 0 and not (single and x.dim()):
        return NotImplemented
    x = x if dtype is None else x.to(dtype)
    if ord == 0:
        return x.ne(0).to(x.dtype).sum(dims, keepdim) if x.dim() else x.ne(0).to(x.dtype)
    if single:
        return x.abs() if keepdim or not x.dim() else x.abs().squeeze(dims)
    return torch.linalg.vector_norm(x, ord, dims, keepdim)


def _gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """OpenVINO wants an index as large as the tensor, but along the dimension, and takes a slice before it away."""
    dim = dim % max(x.dim(), 1)
    sizes = [(d, size, index.shape[d]) for d, size in enumerate(x.shape) if d != dim]
    larger = [(d, wanted) for d, size, wanted in sizes if type(size) is type(wanted) is int and size != wanted]
    if not larger:
        return NotImplemented
    for d, wanted in larger:
        x = torch.index_select(x, d, torch.arange(wanted))
    return torch.gather(x, dim, index)


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """OpenVINO does not broadcast the tensor that is written to."""
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    if shape == x.shape:
        return NotImplemented
    return torch.masked_scatter(x.expand(shape).clone(), mask.expand(shape), source)


def _add_product(x: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """With a beta of 0 torch does not look at the summand, which may be memory that nobody wrote to."""
    if beta != 0 or not x.is_floating_point():
        return NotImplemented
    # The narrower factor first: the product itself might exceed float16.
    return torch.matmul(left if alpha == 1 else left * alpha, right)


# --- truth values -------------------------------------------------------------------------------------------------


def _logical(op: Any) -> Callable[..., Any]:
    """OpenVINO takes NaN for False."""

    def decomposed(x: Tensor, y: Tensor) -> Tensor:
        if x.dtype is torch.bool and y.dtype is torch.bool:
            return NotImplemented
        return op(_truth(x), _truth(y))

    return decomposed


def _truth(x: Tensor) -> Tensor:
    return x if x.dtype is torch.bool else x.ne(0)


def _logical_not(x: Tensor) -> Tensor:
    return NotImplemented if x.dtype is torch.bool else x.eq(0)


def _any_dims(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _any_over(_truth(x), [] if dim is None else list(dim), keepdim) if dim != [] else _truth(x)


def _of_truth(reduce: Any) -> Callable[..., Any]:
    """OpenVINO takes the NaN of a scalar for False."""

    def decomposed(x: Tensor, *where: Any) -> Tensor:
        return NotImplemented if x.dtype is torch.bool else reduce(_truth(x), *where)

    return decomposed


def _never(x: Tensor) -> Tensor:
    """isnan and isinf of integers fail in OpenVINO."""
    return NotImplemented if x.is_floating_point() or x.is_complex() else torch.zeros_like(x, dtype=torch.bool)


def _sign(x: Tensor) -> Tensor:
    return x.clone() if x.dtype is torch.bool else NotImplemented


def _affine_grid(theta: Tensor, size: list[int], align_corners: bool) -> Tensor:
    """torch's own formula makes a constant of a dimension of 1, in a way that cannot be traced."""
    if any(each <= 1 for each in size[2:]):
        return NotImplemented
    return torch._decomp.decomposition_table[aten.affine_grid_generator.default](theta, size, align_corners)


def _interpolate(packet: Any, *, listed: bool) -> Callable[..., Any]:
    """OpenVINO takes the first value along a dimension that shrinks to 1, where torch takes the middle.

    Args:
        packet: The operator.
        listed: Whether this is the overload with a list of factors, instead of the sizes.
    """

    def decomposed(x: Tensor, output_size: list[int] | None, align_corners: bool, *factors: Any) -> Tensor:
        scales = list(factors[0] or []) if listed and factors else list(factors)
        spatial = x.shape[2:]
        sizes = output_size or [int(size * scale) for size, scale in zip(spatial, scales, strict=True)]
        if 1 not in sizes:
            return NotImplemented
        return torch._decomp.decomposition_table[packet.default](x, sizes, align_corners, *scales)

    return decomposed


REPAIRS: dict[Any, Callable[..., Any]] = {
    aten.abs.default: _abs,
    aten.div.Tensor_mode: _divide,
    aten.var_mean.correction: _var_mean,
    aten.var.correction: _var,
    aten.std.correction: _std,
    aten.sort.default: _sort,
    aten.sort.stable: _sort_stable,
    aten.amax.default: _extreme(torch.amax, -math.inf, _any_over),
    aten.amin.default: _extreme(torch.amin, math.inf, _all_over),
    aten.max.default: _whole(torch.amax),
    aten.min.default: _whole(torch.amin),
    aten.max.dim: _with_index(torch.amax, torch.argmax),
    aten.min.dim: _with_index(torch.amin, torch.argmin),
    aten.linalg_vector_norm.default: _vector_norm,
    aten.gather.default: _gather,
    aten.masked_scatter.default: _masked_scatter,
    aten.addmm.default: _add_product,
    aten.baddbmm.default: _add_product,
    aten.argmin.default: once(_argmin),
    aten.maximum.default: _binary_extreme(torch.logical_or),
    aten.minimum.default: _binary_extreme(torch.logical_and),
    aten.logical_and.default: _logical(torch.logical_and),
    aten.logical_or.default: _logical(torch.logical_or),
    aten.logical_xor.default: _logical(torch.logical_xor),
    aten.logical_not.default: _logical_not,
    aten.any.default: _of_truth(torch.any),
    aten.any.dim: _of_truth(torch.any),
    aten.all.default: _of_truth(torch.all),
    aten.any.dims: _any_dims,
    aten.isnan.default: _never,
    aten.isinf.default: _never,
    aten.sign.default: _sign,
    aten.affine_grid_generator.default: _affine_grid,
    aten.upsample_linear1d.vec: _interpolate(aten.upsample_linear1d, listed=True),
    aten.upsample_bilinear2d.vec: _interpolate(aten.upsample_bilinear2d, listed=True),
    aten.upsample_trilinear3d.vec: _interpolate(aten.upsample_trilinear3d, listed=True),
    aten.upsample_bicubic2d.vec: _interpolate(aten.upsample_bicubic2d, listed=True),
    aten.upsample_linear1d.default: _interpolate(aten.upsample_linear1d, listed=False),
    aten.upsample_bilinear2d.default: _interpolate(aten.upsample_bilinear2d, listed=False),
    aten.upsample_trilinear3d.default: _interpolate(aten.upsample_trilinear3d, listed=False),
    aten.upsample_bicubic2d.default: _interpolate(aten.upsample_bicubic2d, listed=False),
}
