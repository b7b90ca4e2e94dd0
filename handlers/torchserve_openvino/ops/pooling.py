"""Average pooling with ceil_mode or a divisor, which OpenVINO computes otherwise than torch; and the way back."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten


def _each(value: list[int], dims: int) -> list[int]:
    return list(value) * dims if len(value) == 1 else list(value)


def _out_size(size: int, kernel: int, stride: int, pad: int, ceil: bool) -> int:
    """Windows along a dimension, as torch's pooling_output_shape counts them: the last starts within the input."""
    count = (size + 2 * pad - kernel + (stride - 1 if ceil else 0)) // stride + 1
    return count - 1 if ceil and (count - 1) * stride >= size + pad else count


def _counts(size: int, kernel: int, stride: int, pad: int, windows: int, include_pad: bool) -> Tensor:
    """By how many elements torch divides each window's sum, along one dimension."""
    start = torch.arange(windows) * stride - pad
    end = torch.clamp(start + kernel, max=size + pad)
    return end - start if include_pad else torch.clamp(end, max=size) - torch.clamp(start, min=0)


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
        # Zeros around the input, until the last window lies inside.
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


def _unpool(dims: int) -> Callable[..., Any]:
    """torch's own decomposition takes a negative position for one from the end, where eager refuses it."""

    def decomposed(x: Tensor, indices: Tensor, output_size: list[int], *_: list[int]) -> Tensor:
        before = x.shape[:-dims]
        zeros = torch.zeros([*before, math.prod(output_size)], dtype=x.dtype)
        return zeros.scatter(-1, indices.flatten(-dims), x.flatten(-dims)).reshape([*before, *output_size])

    return decomposed


POOLING: dict[Any, Callable[..., Any]] = {
    aten.avg_pool1d.default: _average_pool(1, torch.avg_pool1d),
    aten.avg_pool2d.default: _average_pool(2, F.avg_pool2d),
    aten.avg_pool3d.default: _average_pool(3, F.avg_pool3d),
    aten.max_unpool2d.default: _unpool(2),
    aten.max_unpool3d.default: _unpool(3),
}
