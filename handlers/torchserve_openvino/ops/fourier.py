"""Fourier transforms of pairs: complex numbers as real tensors with a last dimension of 2, which OpenVINO computes.

Each operator here is torch's own transform with pairs in place of complex numbers; `ops.rules.complex_numbers` puts
them into the graph. OpenVINO's inverse transforms divide by the length; torch's divide by what ``normalization`` says:
0 nothing, 1 the length's square root, 2 the length (aten/src/ATen/native/SpectralOpsUtils.h, fft_norm_mode).

OpenVINO's transforms are fast and exact where the length is a power of 2. For another length n they take n^2 steps and
lose digits: a thousandth of the value at length 10,000, less where the values are real. A product of matrices serves
short ones, eager the others.
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

from torchserve_openvino.ops.memory_order import example_of
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
# Measured on one core with 100 rows: at length 512 a matrix product and a real transform take the same time.
_SHORT = 512
_SHORT_NO_POWER = 2 * _SHORT


def serves(length: Any) -> bool:
    """Returns whether a length is transformed on OpenVINO; a symbolic one is not."""
    return isinstance(length, int) and (_is_power_of_2(length) or 0 < length <= _SHORT_NO_POWER)


def serves_open(length: Any, normalization: int) -> bool:
    """Returns whether a real transform of a symbolic length is: torch's equals OpenVINO's without a factor."""
    return normalization == 0 and _is_power_of_2(example_of(length))


def _is_power_of_2(length: int) -> bool:
    return length > 0 and length & (length - 1) == 0


def _is_plain(normalization: int, inverse: bool) -> bool:
    """Returns whether OpenVINO's transform equals torch's without a factor, which depends on the length."""
    return normalization == (2 if inverse else 0)


def _scaled(spectrum: Any, length: int, normalization: int, inverse: bool) -> Any:
    """Corrects a result for the different divisors of OpenVINO and torch."""
    if _is_plain(normalization, inverse):
        return spectrum
    factor = {0: 1.0, 1: 1 / math.sqrt(length), 2: 1 / length}[normalization] * (length if inverse else 1)
    return ops.multiply(spectrum, np.float32(factor))


def convert_r2c(x: Output, dim: Sequence[int], normalization: int, onesided: bool, *, sizes: Sequence[int]) -> Any:
    """Builds torch._fft_r2c from OpenVINO operations; ``sizes`` are those of the dimensions ``dim``."""
    length = sizes[-1]
    if length and (not _is_power_of_2(length) or (length <= _SHORT and dim[-1] == rank(x) - 1)):
        frequencies = length // 2 + 1 if onesided else length
        # Its columns are pairs: the real parts, the imaginary ones.
        matrix = _waves(length, frequencies).transpose(0, 2, 1).reshape(length, -1)
        pairs = _multiplied(ops.unsqueeze(x, int64([-1])).output(0), dim[-1], matrix, frequencies)
    elif onesided:
        pairs = ops.rdft(x, int64([dim[-1]])).output(0)
    else:
        real = ops.unsqueeze(x, int64([-1]))
        pairs = ops.dft(ops.concat([real, ops.multiply(real, np.float32(0))], -1), int64([dim[-1]])).output(0)
    pairs = _transformed(pairs, dim[:-1], sizes[:-1], forward=True)
    return _scaled(pairs, math.prod(sizes), normalization, False)


def convert_c2c(x: Output, dim: Sequence[int], normalization: int, forward: bool, *, sizes: Sequence[int]) -> Any:
    """Builds torch._fft_c2c in the same way."""
    return _scaled(_transformed(x, dim, sizes, forward), math.prod(sizes), normalization, not forward)


def convert_c2r(x: Output, dim: Sequence[int], normalization: int, last: int, *, sizes: Sequence[int]) -> Any:
    """Builds torch._fft_c2r in the same way."""
    pairs = _transformed(x, dim[:-1], sizes[:-1], forward=False)
    if _is_power_of_2(last):
        reals = ops.irdft(pairs, int64([dim[-1]]), int64([last]))
    else:
        # All frequencies but the first (and the middle one of an even length) stand for two.
        waves = _waves(last, sizes[-1])
        weights = np.where((np.arange(sizes[-1]) == 0) | (2 * np.arange(sizes[-1]) == last), 1, 2) / last
        matrix = (waves * weights).transpose(2, 1, 0).reshape(2 * sizes[-1], last)
        reals = ops.squeeze(_multiplied(pairs, dim[-1], matrix, last), int64([-1]))
    return _scaled(reals, math.prod([*sizes[:-1], last]), normalization, True)


def _transformed(pairs: Output, dim: Sequence[int], sizes: Sequence[int], forward: bool) -> Output:
    """Transforms pairs along dimensions; backward, it divides by the lengths, as OpenVINO does."""
    plain = [axis for axis, size in zip(dim, sizes, strict=True) if _is_power_of_2(size)]
    if plain:
        pairs = (ops.dft if forward else ops.idft)(pairs, int64(plain)).output(0)
    for axis, size in zip(dim, sizes, strict=True):
        if axis not in plain:
            real, imaginary = np.moveaxis(_waves(size, size), 1, 0)
            if not forward:
                real, imaginary = real / size, -imaginary / size
            # (a + ib)(c + id): a row for each of a and b, a column for the real and the imaginary part.
            matrix = np.stack([np.stack([real, imaginary], -1), np.stack([-imaginary, real], -1)], 1)
            pairs = _multiplied(pairs, axis, matrix.reshape(2 * size, 2 * size), size)
    return pairs


def _waves(length: int, frequencies: int) -> np.ndarray:
    """Returns exp(-2 pi i j k / length) of the definition, in float64: ``[length, 2, frequencies]``."""
    # j k is reduced modulo the length first, so that no digits are lost.
    angles = np.outer(np.arange(length), np.arange(frequencies)) % length * (-2 * np.pi / length)
    return np.stack([np.cos(angles), np.where(2 * angles % (2 * np.pi) == 0, 0, np.sin(angles))], 1)


def _multiplied(x: Output, axis: int, matrix: np.ndarray, size: int) -> Output:
    """Multiplies values, of an axis and the last one together, by a matrix.

    Args:
        x: Its last axis has one real part, or pairs.
        matrix: A row for each of these values, a column for each new one.
        size: New size of the axis; the last axis gets what remains.
    """
    dims = rank(x)
    axis %= dims - 1
    order = [each for each in range(dims) if each not in {axis, dims - 1}] + [axis, dims - 1]
    if order != list(range(dims)):
        x = ops.transpose(x, int64(order)).output(0)
    flat = ops.reshape(x, int64([0] * (dims - 2) + [-1]), True)
    product = ops.matmul(flat, ops.constant(matrix.astype(np.float32)), False, False)
    apart = ops.reshape(product, int64([0] * (dims - 2) + [size, matrix.shape[1] // size]), True)
    if order != list(range(dims)):
        apart = ops.transpose(apart, int64([order.index(each) for each in range(dims)]))
    return apart.output(0)


def facts(node: Node) -> dict[str, Any]:
    """Returns the sizes of the transformed dimensions; 0 for one that is symbolic."""
    source, dim = node.args[:2]
    assert isinstance(source, Node) and isinstance(dim, (list, tuple))
    shape = value_of(source).shape
    return {"sizes": [shape[axis] if isinstance(shape[axis], int) else 0 for axis in dim]}
