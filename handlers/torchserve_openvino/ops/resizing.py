"""Resizing of images as lookups and sums of tensors, where OpenVINO's operator would count the new sizes otherwise."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def by_axes(op: Any) -> Callable[..., Any]:
    """Makes a decomposition that resizes one dimension after the other.

    torch's own looks up each combination of neighbors in all dimensions together, for which OpenVINO moves the channels
    last and back: 75 ms where this takes 13 (32 channels of 128 x 128, 1.7 times as large, open sizes).
    """
    name, packet = str(op), op.overloadpacket
    taps = 4 if "cubic" in name else 2 if "linear" in name else 1

    def resize(x: Tensor, sizes: list[Any], *options: Any) -> Tensor:
        factors, align_corners = options[-len(sizes) :], len(options) > len(sizes) and options[0]
        if not x.is_floating_point():
            return torch._decomp.decomposition_table[packet.default](x, sizes, *options)
        value = x if taps == 1 else x.to(torch.float32)
        for axis, (new, factor) in enumerate(zip(sizes, factors, strict=True), 2):
            if taps == 1:
                value = _looked_up(value, axis, _nearest_places(x.shape[axis], new, factor, "exact" in name))
            else:
                source = _source_places(x.shape[axis], new, factor, align_corners)
                value = (_cubic if taps == 4 else _linear)(value, axis, source)
        return value.to(x.dtype)

    return resize


def _looked_up(x: Tensor, axis: int, places: Tensor) -> Tensor:
    """Returns the values at positions along an axis, which are limited to it."""
    indices = places.to(torch.int64).clamp(0, x.shape[axis] - 1)
    return torch.index_select(x, axis, indices)


def _nearest_places(size: Any, new: Any, factor: float | None, exact: bool) -> Tensor:
    return (torch.arange(new).to(torch.float32) + (0.5 if exact else 0.0)) * _step(size, new, factor)


def _source_places(size: Any, new: Any, factor: float | None, align_corners: bool) -> Tensor:
    """Returns where each new value lies among the old ones (area_pixel_compute_source_index in UpSample.h)."""
    places = torch.arange(new).to(torch.float32)
    if align_corners:
        return places * (_step(size - 1, new - 1, None) if new > 1 else 0.0)
    return (places + 0.5) * _step(size, new, factor) - 0.5


def _step(size: Any, new: Any, factor: float | None) -> Any:
    """Returns the distance of new values: a number, or a float32 tensor where it depends on open sizes."""
    if factor:
        return 1.0 / factor
    if isinstance(size, int) and isinstance(new, int):
        return size / new
    before, after = (torch.scalar_tensor(each, dtype=torch.int64).to(torch.float32) for each in (size, new))
    return before / after


def _linear(x: Tensor, axis: int, source: Tensor) -> Tensor:
    source = source.clamp(min=0.0)
    first = source.floor()
    low, high = (_looked_up(x, axis, first + step) for step in (0, 1))
    return low + (high - low) * _along_axis(source - first, x.dim(), axis)


def _cubic(x: Tensor, axis: int, source: Tensor) -> Tensor:
    first, a = source.floor(), -0.75
    past = source - first
    # Keys' kernel, of the distances from four neighbors.
    near = [((a + 2) * t - (a + 3)) * t * t + 1 for t in (past, 1 - past)]
    far = [((a * t - 5 * a) * t + 8 * a) * t - 4 * a for t in (past + 1, 2 - past)]
    weights = (far[0], *near, far[1])
    parts = [
        _looked_up(x, axis, first + step) * _along_axis(weight, x.dim(), axis)
        for step, weight in zip((-1, 0, 1, 2), weights, strict=True)
    ]
    return parts[0] + parts[1] + parts[2] + parts[3]


def _along_axis(values: Tensor, rank: int, axis: int) -> Tensor:
    """Shapes values so that they are broadcast to all but one axis."""
    return values.reshape([-1] + [1] * (rank - 1 - axis))
