"""Fourier transforms of pairs: complex numbers as real tensors with a last dimension of 2, which OpenVINO computes.

Each operator here is torch's own transform with pairs in place of complex numbers; `ops.rules.complex_numbers` puts
them into the graph. OpenVINO's inverse transforms divide by the length; torch's divide by what ``normalization`` says:
0 nothing, 1 the length's square root, 2 the length (aten/src/ATen/native/SpectralOpsUtils.h, fft_norm_mode).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from openvino import Output
from openvino import opset15 as ops
from torch import Tensor
from torch.fx import Node

from torchserve_openvino.ops.names import value_of
from torchserve_openvino.ops.openvino_values import int64, rank

aten = torch.ops.aten
_LIBRARY = torch.library.Library("openvino_fft", "DEF")


def _define(schema: str, run: Callable[..., Tensor]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"openvino_fft::{name}", run, lib=_LIBRARY)


def _pairs(x: Tensor) -> Tensor:
    # Contiguous: a custom operator must not return a view, and OpenVINO's result is contiguous.
    return torch.view_as_real(x).clone(memory_format=torch.contiguous_format)


def _r2c(x: Tensor, dim: list[int], normalization: int, onesided: bool) -> Tensor:
    return _pairs(aten._fft_r2c(x, dim, normalization, onesided))


def _c2c(x: Tensor, dim: list[int], normalization: int, forward: bool) -> Tensor:
    return _pairs(aten._fft_c2c(torch.view_as_complex(x.contiguous()), dim, normalization, forward))


def _c2r(x: Tensor, dim: list[int], normalization: int, last: int) -> Tensor:
    return aten._fft_c2r(torch.view_as_complex(x.contiguous()), dim, normalization, last).contiguous()


_define("r2c(Tensor x, int[] dim, int normalization, bool onesided) -> Tensor", _r2c)
_define("c2c(Tensor x, int[] dim, int normalization, bool forward) -> Tensor", _c2c)
_define("c2r(Tensor x, int[] dim, int normalization, int last) -> Tensor", _c2r)
OPERATORS = torch.ops.openvino_fft
# Measured on one core with 100 rows: at length 512 a matrix product and a transform take the same time.
_SHORT = 512


def is_plain(normalization: int, inverse: bool) -> bool:
    """Returns whether OpenVINO's transform equals torch's without a factor, which depends on the length."""
    return normalization == (2 if inverse else 0)


def _scaled(found: Any, length: int, normalization: int, inverse: bool) -> Any:
    """Corrects a result for the different divisors of OpenVINO and torch."""
    if is_plain(normalization, inverse):
        return found
    factor = {0: 1.0, 1: 1 / math.sqrt(length), 2: 1 / length}[normalization] * (length if inverse else 1)
    return ops.multiply(found, np.float32(factor))


def convert_r2c(x: Output, dim: Sequence[int], normalization: int, onesided: bool, *, sizes: Sequence[int]) -> Any:
    """Builds torch._fft_r2c from OpenVINO operations; ``sizes`` are those of the dimensions ``dim``."""
    if list(dim) == [rank(x) - 1] and _is_short(sizes[0]):
        return _scaled(_by_product(x, sizes[0], onesided), sizes[0], normalization, False)
    if onesided:
        found = ops.rdft(x, int64(dim))
    else:
        real = ops.unsqueeze(x, int64([-1]))
        found = ops.dft(ops.concat([real, ops.multiply(real, np.float32(0))], -1), int64(dim))
    return _scaled(found, math.prod(sizes), normalization, False)


def _is_short(length: int) -> bool:
    """Returns whether a matrix product is faster than OpenVINO's transform, which is fast for powers of 2 only."""
    return 0 < length <= (_SHORT if length & (length - 1) == 0 else 2 * _SHORT)


def _by_product(x: Output, length: int, onesided: bool) -> Any:
    """Multiplies by the matrix exp(-2 pi i j k / length) of the definition; j k is reduced modulo the length first."""
    frequencies = np.arange(length // 2 + 1 if onesided else length)
    angles = np.outer(np.arange(length), frequencies) % length * (-2 * np.pi / length)
    matrix = np.stack([np.cos(angles), np.sin(angles)], -1).reshape(length, -1).astype(np.float32)
    product = ops.matmul(x, ops.constant(matrix), False, False)
    dims = rank(x)
    return ops.reshape(product, int64([0] * (dims - 1) + [len(frequencies), 2]), True)


def convert_c2c(x: Output, dim: Sequence[int], normalization: int, forward: bool, *, sizes: Sequence[int]) -> Any:
    """Builds torch._fft_c2c in the same way."""
    transform = ops.dft if forward else ops.idft
    return _scaled(transform(x, int64(dim)), math.prod(sizes), normalization, not forward)


def convert_c2r(x: Output, dim: Sequence[int], normalization: int, last: int, *, sizes: Sequence[int]) -> Any:
    """Builds torch._fft_c2r in the same way."""
    sizes = [*sizes[:-1], last]
    return _scaled(ops.irdft(x, int64(dim), int64(sizes)), math.prod(sizes), normalization, True)


def facts(node: Node) -> dict[str, Any]:
    """Returns the sizes of the transformed dimensions; 0 for one that is not known."""
    source, dim = node.args[:2]
    assert isinstance(source, Node) and isinstance(dim, (list, tuple))
    shape = value_of(source).shape
    return {"sizes": [shape[axis] if isinstance(shape[axis], int) else 0 for axis in dim]}
