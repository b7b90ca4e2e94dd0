"""Operators on images and feature maps: pooling, padding, resizing, regions of interest."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from openvino import Output, Type
from openvino import opset15 as ops
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from torchserve_openvino.ops.names import arguments_of, first_input, value_of
from torchserve_openvino.ops.opaque_ops import (
    RESIZERS,
    has_open_sizes,
    is_ambiguous,
    is_binary,
    new_sizes,
    resizes_whole,
)
from torchserve_openvino.ops.openvino_values import exact_quotient, int64, static_shape
from torchserve_openvino.ops.rule_registry import Movement, Rule, TracedCall, conversion, declare, decomposition

aten = torch.ops.aten

declare(
    Rule(verified=True),
    aten.channel_shuffle.default, aten.col2im.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default,
    aten.reflection_pad1d.default, aten.reflection_pad3d.default,
)  # fmt: skip
declare(Rule(traced=TracedCall("grid_sampler", torch.grid_sampler)), aten.grid_sampler_2d.default)


# --- pooling ------------------------------------------------------------------------------------------------------

declare(Rule(movement=Movement.SELECTS), aten.max_pool2d_with_indices)
declare(Rule(traced=TracedCall("adaptive_avg_pool2d", F.adaptive_avg_pool2d)), aten._adaptive_avg_pool2d.default)
declare(Rule(traced=TracedCall("adaptive_avg_pool3d", F.adaptive_avg_pool3d)), aten._adaptive_avg_pool3d.default)


def _each(value: list[int], dims: int) -> list[int]:
    return list(value) * dims if len(value) == 1 else list(value)


def _out_size(size: int, kernel: int, stride: int, pad: int, ceil: bool) -> int:
    """Counts the windows along a dimension like torch's pooling_output_shape: the last starts within the input."""
    count = (size + 2 * pad - kernel + (stride - 1 if ceil else 0)) // stride + 1
    return count - 1 if ceil and (count - 1) * stride >= size + pad else count


def _counts(size: int, kernel: int, stride: int, pad: int, windows: int, include_pad: bool) -> Tensor:
    """Returns the count by which torch divides each window's sum, along one dimension."""
    start = torch.arange(windows) * stride - pad
    end = torch.clamp(start + kernel, max=size + pad)
    return end - start if include_pad else torch.clamp(end, max=size) - torch.clamp(start, min=0)


# Larger ones are padded to, where the size of the input is not known; that takes the kernel's size in memory.
_LARGEST_OPEN_KERNEL = 64


def _other_average(node: Node) -> str | None:
    if arguments_of(node).get("ceil_mode"):
        return "average pooling with ceil_mode: OpenVINO divides the last window by another count than torch"
    value = first_input(node)
    if value is not None and not value.is_floating_point():
        return "computed in integers by OpenVINO where torch goes through floats"
    return None


def _average_pool(dims: int, pool: Callable[..., Tensor]) -> Callable[..., Any]:
    def decomposed(
        x: Tensor,
        kernel_size: list[int],
        stride: list[int] | None = None,
        padding: list[int] | None = None,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        if not (ceil_mode or divisor_override) or not x.is_floating_point():
            return NotImplemented
        kernel, pad = _each(kernel_size, dims), _each(padding or [0], dims)
        step = _each(stride, dims) if stride else kernel
        sizes = list(x.shape[-dims:])
        facts = list(zip(sizes, kernel, step, pad, strict=True))
        windows = [_out_size(*fact, ceil_mode) for fact in facts]
        if any(k > _LARGEST_OPEN_KERNEL for size, k, *_ in facts if not isinstance(size, int)):
            return NotImplemented
        # What a kernel covers beyond the input would be padded: EfficientNet's is as large as its channels are many.
        facts = [(n, min(k, n + 2 * p) if isinstance(n, int) else k, s, p) for n, k, s, p in facts]
        kernel = [k for _, k, *_ in facts]
        # Zeros around the input, so that the last window lies inside.
        more = [max(0, (n - 1) * s + k - size - p) for n, (size, k, s, p) in zip(windows, facts, strict=True)]
        around = [side for p, m in zip(reversed(pad), reversed(more), strict=True) for side in (p, m)]
        total = 1
        for k in kernel:
            total *= k
        summed = pool(F.pad(x, around), kernel, step) * float(total)
        for i, n in enumerate(windows):
            summed = summed.narrow(i - dims, 0, n)
        if divisor_override:
            return summed / float(divisor_override)
        divisor = torch.ones([], dtype=x.dtype)
        for i, (n, fact) in enumerate(zip(windows, facts, strict=True)):
            count = _counts(*fact, n, count_include_pad).to(x.dtype)
            divisor = divisor * count.reshape([-1] + [1] * (dims - 1 - i))
        return summed / divisor

    return decomposed


declare(Rule(decompose=_average_pool(1, torch.avg_pool1d), limit=_other_average), aten.avg_pool1d.default)
declare(Rule(decompose=_average_pool(2, F.avg_pool2d), limit=_other_average), aten.avg_pool2d.default)
declare(Rule(decompose=_average_pool(3, F.avg_pool3d), limit=_other_average), aten.avg_pool3d.default)


def _unpool(dims: int) -> Callable[..., Any]:
    """Replaces torch's own decomposition, which counts negative positions from the end; eager raises for them."""

    def decomposed(x: Tensor, indices: Tensor, output_size: list[int], *_: list[int]) -> Tensor:
        before = x.shape[:-dims]
        zeros = torch.zeros([*before, math.prod(output_size)], dtype=x.dtype)
        return zeros.scatter(-1, indices.flatten(-dims), x.flatten(-dims)).reshape([*before, *output_size])

    return decomposed


declare(Rule(decompose=_unpool(2)), aten.max_unpool2d.default)
declare(Rule(decompose=_unpool(3)), aten.max_unpool3d.default)


# --- padding and resizing -----------------------------------------------------------------------------------------


@conversion(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def _replication_pad(x: Output, padding: Sequence[int]) -> Any:
    """Repeats the edges; ``padding`` holds begin and end in turn, starting with the last dimension."""
    rank = len(static_shape(x))
    begin, end = [0] * rank, [0] * rank
    for i in range(len(padding) // 2):
        begin[rank - 1 - i], end[rank - 1 - i] = padding[2 * i], padding[2 * i + 1]
    return ops.pad(x, int64(begin), int64(end), "edge")


@decomposition(aten.affine_grid_generator.default)
def _affine_grid(theta: Tensor, size: list[int], align_corners: bool) -> Tensor:
    """Declines dimensions of 1, of which torch's own formula makes constants in a way that cannot be traced."""
    if any(length <= 1 for length in size[2:]):
        return NotImplemented
    return torch._decomp.decomposition_table[aten.affine_grid_generator.default](theta, size, align_corners)


def _interpolate(packet: Any) -> Callable[..., Any]:
    """Decomposes resizing to a size of 1: OpenVINO takes the first value along that dimension, torch the middle."""

    def decomposed(x: Tensor, output_size: list[int], align_corners: bool, *factors: Any) -> Tensor:
        if 1 not in output_size:
            return NotImplemented
        return torch._decomp.decomposition_table[packet.default](x, output_size, align_corners, *factors)

    return decomposed


for _packet in (
    aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d, aten.upsample_bicubic2d,
):  # fmt: skip
    declare(Rule(decompose=_interpolate(_packet)), _packet.default)


def _spatial(x: Output) -> list[int]:
    return [int(dimension.get_length()) for dimension in list(x.get_partial_shape())[2:]]


def _is_open(x: Output, output_size: Sequence[Any] | None) -> bool:
    dynamic = any(size.is_dynamic for size in list(x.get_partial_shape())[2:])
    return dynamic or any(isinstance(size, Output) for size in output_size or ())


def _sizes_of(output_size: Sequence[Any]) -> Any:
    """Returns sizes, some of which are computed, as one tensor."""
    sizes = [size if isinstance(size, Output) else int64(size) for size in output_size]
    return ops.concat([ops.reshape(size, int64([1]), False) for size in sizes], 0)


def _resized(x: Output, sizes: Any, mode: str, coordinates: str, factors: Sequence[float] | None = None) -> Any:
    """Resizes all but the first two dimensions.

    Args:
        sizes: The new sizes, or a tensor of them; not used if there are factors.
        factors: By which torch steps, where the new sizes are rounded; otherwise the sizes determine it.
    """
    by = ops.constant(np.array(factors, np.float32)) if factors is not None else None
    to = by if by is not None else int64(sizes) if isinstance(sizes, list) else sizes
    return ops.interpolate(
        x, to, mode, "sizes" if by is None else "scales", coordinate_transformation_mode=coordinates,
        nearest_mode="floor", cube_coeff=-0.75, axes=int64(list(range(2, len(x.get_partial_shape())))),
    )  # fmt: skip


def _nearest_of(size: int, new: int, factor: float | None, exact: bool) -> np.ndarray:
    """Returns which value each new one is, as torch's kernels count in float32 (aten/src/ATen/native/UpSample.h)."""
    step = np.float32(1.0 / factor) if factor else np.float32(size) / np.float32(new)
    places = np.arange(new, dtype=np.float32) + np.float32(0.5 if exact else 0)
    if new in {size, 2 * size} and not exact:
        return np.arange(new) // (new // size)
    return np.minimum(np.floor(places * step).astype(np.int64), size - 1)


def _nearest(exact: bool) -> Callable[..., Any]:
    def convert(x: Output, output_size: Sequence[Any] | None, scale_factors: Sequence[float] | None) -> Any:
        if _is_open(x, output_size):
            return _open_nearest(x, output_size, scale_factors, exact)
        spatial = _spatial(x)
        sizes = new_sizes(spatial, output_size, scale_factors)
        factors: Sequence[float | None] = scale_factors or [None] * len(sizes)
        nearest = [_nearest_of(*axis, exact) for axis in zip(spatial, sizes, factors, strict=True)]
        times = [new // size for size, new in zip(spatial, sizes, strict=True)]
        repeats = [
            np.array_equal(np.repeat(np.arange(n), k), f) for n, k, f in zip(spatial, times, nearest, strict=True)
        ]
        if len(spatial) == 2 and all(repeats):
            return _resized(x, sizes, "nearest", "asymmetric")
        for axis, places in enumerate(nearest, 2):
            x = ops.gather(x, int64(list(places)), int64(axis)).output(0)
        return x

    return convert


def _open_nearest(x: Output, output_size: Sequence[Any] | None, factors: Sequence[float] | None, exact: bool) -> Any:
    """Looks up the nearest values as `_nearest_of` does, at positions that are computed at each call."""
    if factors and not exact and len(factors) == 2 and all(factor.is_integer() for factor in factors):
        return _resized(x, None, "nearest", "asymmetric", factors)
    zero, half, one = (ops.constant(np.float32(value)) for value in (0.0, 0.5, 1.0))
    for i in range(len(output_size or factors or ())):
        axis = int64(i + 2)
        last = ops.subtract(ops.gather(ops.shape_of(x, "i64"), axis, int64(0)), int64(1))
        size = ops.convert(ops.add(last, int64(1)), "f32")
        if output_size:
            new = ops.convert(ops.squeeze(_sizes_of([output_size[i]]), int64([0])), "f32")
            step = exact_quotient(size, new)
        else:
            assert factors is not None and is_binary(factors[i])
            new = ops.floor(ops.multiply(size, ops.constant(np.float32(factors[i]))))
            step = ops.constant(np.float32(1.0 / factors[i]))
            if not exact:
                step = ops.select(ops.equal(new, ops.add(size, size)), half, step)
                step = ops.select(ops.equal(new, size), one, step)
        positions = ops.range(zero, new, one, "f32")
        nearest = ops.floor(ops.multiply(ops.add(positions, half) if exact else positions, step))
        x = ops.gather(x, ops.minimum(ops.convert(nearest, "i64"), last), axis).output(0)
    return x


def _smooth(mode: str) -> Callable[..., Any]:
    def convert(
        x: Output, output_size: Sequence[Any] | None, align_corners: bool, scale_factors: Sequence[float] | None
    ) -> Any:
        coordinates = "align_corners" if align_corners else "half_pixel"
        if _is_open(x, output_size):
            assert all(map(is_binary, scale_factors or ()))
            sizes, factors = output_size, list(scale_factors) if scale_factors else None
        else:
            spatial = _spatial(x)
            sizes = new_sizes(spatial, output_size, scale_factors)
            rounded = scale_factors and [size * by for size, by in zip(spatial, scale_factors, strict=True)] != sizes
            factors = list(scale_factors or ()) if rounded and not align_corners else None
        count = len(sizes or factors or ())
        if count > 1:
            return _resized(x, sizes and _sizes_of(sizes), mode, coordinates, factors)
        # OpenVINO's kernel has two or three dimensions.
        wide = ops.unsqueeze(x, int64([2])).output(0)
        flat = _resized(wide, sizes and _sizes_of([1, *sizes]), mode, coordinates, factors and [1.0, *factors])
        return ops.squeeze(flat, int64([2]))

    return convert


def _apart(op: Any) -> Callable[..., Any]:
    """Decomposes what is not converted whole, where torch keeps the operator (torch.export)."""

    def decomposed(x: Tensor, output_size: list[int] | None, *options: Any) -> Tensor:
        factors = options[-1]
        if resizes_whole(x, output_size, factors) or has_open_sizes(x, output_size, factors):
            return NotImplemented
        if is_ambiguous(op, x, factors):
            return NotImplemented
        sizes = new_sizes(x.shape[2:], output_size, factors)
        default = torch._decomp.decomposition_table[op.overloadpacket.default]
        return default(x, sizes, *options[:-1], *(factors or [None] * len(sizes)))

    return decomposed


def _not_whole(node: Node) -> str | None:
    value, arguments = first_input(node), arguments_of(node)
    sizes = arguments.get("output_size")
    if value is not None and is_ambiguous(node.target, value, arguments.get("scale_factors")):
        return "torch's kernels disagree on the nearest values for this factor"
    known = sizes and [value_of(size) if isinstance(size, Node) else size for size in sizes]
    if value is not None and resizes_whole(value, known, arguments.get("scale_factors")):
        return None
    return "resized to sizes that OpenVINO would round otherwise"


for _op in RESIZERS:
    _name = str(_op)
    _mode = "cubic" if "cubic" in _name else "linear_onnx"
    _convert = _nearest(exact="exact" in _name) if "nearest" in _name else _smooth(_mode)
    declare(Rule(convert=_convert, decompose=_apart(_op), limit=_not_whole), _op)


# --- resizing with antialiasing -----------------------------------------------------------------------------------


def _tent(x: np.ndarray) -> np.ndarray:
    return np.maximum(0.0, 1.0 - np.abs(x))


def _cubic(x: np.ndarray) -> np.ndarray:
    """R. Keys, "Cubic convolution interpolation for digital image processing" (1981), with a = -0.5."""
    x = np.abs(x)
    near, far = ((1.5 * x - 2.5) * x) * x + 1.0, ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


# Name -> the filter, and half of its width in pixels of the smaller image.
_FILTERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "bilinear": (_tent, 1.0),
    "bicubic": (_cubic, 2.0),
}


def _antialiasing(size: int, new: int, align_corners: bool, factor: float | None, mode: str) -> np.ndarray:
    """Returns the weight of each value in each new one: ``[new, size]``, rows sum to 1.

    As torch's kernel has them (aten/src/ATen/native/cpu/UpSampleKernel.cpp, `_compute_indices_min_size_weights_aa`).
    """
    weigh, half = _FILTERS[mode]
    if align_corners:
        step = (size - 1) / (new - 1) if new > 1 else 0.0
    else:
        step = 1.0 / factor if factor else size / new
    stretched = max(step, 1.0)
    centers, reach = step * (np.arange(new) + 0.5), half * stretched
    first = np.maximum((centers - reach + 0.5).astype(np.int64), 0)[:, None]
    end = np.minimum((centers + reach + 0.5).astype(np.int64), size)[:, None]
    places = np.arange(size)
    weights = weigh((places - centers[:, None] + 0.5) / stretched) * ((places >= first) & (places < end))
    total = weights.sum(1, keepdims=True)
    return (weights / np.where(total == 0, 1.0, total)).astype(np.float32)


_TRACED_ANTIALIASING = "OpenVINO resizes otherwise, where it converts TorchScript"


def _not_antialiased(node: Node) -> str | None:
    value = first_input(node)
    if value is not None and not value.is_floating_point():
        return "torch resizes integers in integers"
    return None


def _antialiased(mode: str) -> Callable[..., Any]:
    def convert(
        x: Output, output_size: Sequence[int], align_corners: bool, scales_h: float | None, scales_w: float | None
    ) -> Any:
        kind = x.get_element_type()
        value = x if kind == Type.f32 else ops.convert(x, "f32").output(0)
        height, width = (
            _antialiasing(size, new, align_corners, factor, mode)
            for size, new, factor in zip(_spatial(x), output_size, (scales_h, scales_w), strict=True)
        )
        wide = ops.matmul(value, ops.constant(width), False, True)
        resized = ops.matmul(ops.constant(height), wide, False, False)
        return resized if kind == Type.f32 else ops.convert(resized, kind)

    return convert


for _mode, _packet in (("bilinear", aten._upsample_bilinear2d_aa), ("bicubic", aten._upsample_bicubic2d_aa)):
    declare(
        Rule(convert=_antialiased(_mode), limit=_not_antialiased, limit_traced=lambda node: _TRACED_ANTIALIASING),
        _packet.default,
    )


# --- regions ------------------------------------------------------------------------------------------------------


# torchvision itself is neither needed nor imported. Non-maximum suppression is not converted: how many boxes it keeps
# is known only after it ran, so torchvision's own kernel runs, counted (`ops.opaque_ops`).
@conversion("torchvision.roi_align.default")
def _roi_align(
    features: Output,
    rois: Output,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Any:
    """Resizes regions of a feature map to one size, by averages of bilinear samples.

    Args:
        features: ``[N, C, H, W]``.
        rois: ``[R, 5]``: the item's index in the batch, then x1, y1, x2, y2 in pixels of the image.
        spatial_scale: Factor from these pixels to those of ``features``.
        sampling_ratio: Samples per bin and direction; with 0 or less it depends on the region's size.
        aligned: Whether coordinates are shifted by half a pixel; otherwise regions are at least one pixel wide.

    Returns:
        ``[R, C, pooled_height, pooled_width]``.
    """
    columns = ops.split(rois, ops.constant(np.int64(1)), 5)
    boxes = ops.concat([columns.output(i) for i in range(1, 5)], 1)
    items = ops.convert(ops.squeeze(columns.output(0), ops.constant(np.array([1], dtype=np.int64))), "i32")
    # OpenVINO reads at any index without a check. (So does torchvision, with undefined results.)
    items = ops.clamp(items, 0, features.get_shape()[0] - 1)
    return ops.roi_align(
        features, boxes, items, pooled_height, pooled_width, max(sampling_ratio, 0), spatial_scale, "avg",
        "half_pixel_for_nn" if aligned else "asymmetric",
    )  # fmt: skip
