"""Fourier transforms of complex numbers as two real tensors, their real and their imaginary parts.

Each operator here is torch's own transform with parts in place of complex numbers; `ops.rules.complex_numbers` puts
them into the graph. What the sums are divided by is what ``normalization`` says: 0 nothing, 1 the length's square root,
2 the length (aten/src/ATen/native/SpectralOpsUtils.h, fft_norm_mode).

Up to a length of 1,024, a transform is a product with matrices of cosines and sines. Cosines are even and sines odd, so
that sums and differences of the values at j and n - j need half of the rows, and the results at k and n - k half of the
columns. OpenVINO's own transforms serve longer powers of 2. Measured on one core in ms, with eager PyTorch's library:

| | eager | product | halved | OpenVINO's own |
| --- | ---: | ---: | ---: | ---: |
| 2,048 real rows of 64 | 0.1 | 0.2 | 0.3 | 2.1 |
| 808 real rows of 400 | 0.3 | 1.8 | 1.8 | 24 |
| 1,024 real rows of 512 | 0.4 | 7.9 | 2.7 | 16 |
| 512 real rows of 1,024 | 0.5 | 12.6 | 4.8 | 15 |

For a length n that is no power of 2, OpenVINO's own take n^2 steps and lose digits: a thousandth of the value at length
10,000. Such long ones run in eager PyTorch.
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
# The real and the imaginary part.
_Parts = tuple[Output, Output]


def _define(schema: str, run: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"openvino_fft::{name}", run, lib=_LIBRARY)


def _apart(x: Tensor) -> tuple[Tensor, Tensor]:
    # Copies: a custom operator must not return views.
    real, imaginary = torch.view_as_real(x).unbind(-1)
    return tuple(part.clone(memory_format=torch.contiguous_format) for part in (real, imaginary))  # type: ignore[return-value]


def _r2c(x: Tensor, dim: list[int], normalization: int, onesided: bool) -> tuple[Tensor, Tensor]:
    return _apart(aten._fft_r2c(x, dim, normalization, onesided))


def _c2c(real: Tensor, imaginary: Tensor, dim: list[int], normalization: int, forward: bool) -> tuple[Tensor, Tensor]:
    return _apart(aten._fft_c2c(torch.complex(real, imaginary), dim, normalization, forward))


def _c2r(real: Tensor, imaginary: Tensor, dim: list[int], normalization: int, last: int) -> Tensor:
    return aten._fft_c2r(torch.complex(real, imaginary), dim, normalization, last).contiguous()


_define("r2c(Tensor x, int[] dim, int normalization, bool onesided) -> (Tensor, Tensor)", _r2c)
_define("c2c(Tensor real, Tensor imaginary, int[] dim, int normalization, bool forward) -> (Tensor, Tensor)", _c2c)
_define("c2r(Tensor real, Tensor imaginary, int[] dim, int normalization, int last) -> Tensor", _c2r)
OPERATORS = torch.ops.openvino_fft
# Longer transforms are no products: the matrices of this length take 2 MB.
_LONGEST_PRODUCT = 1024
# Rows of shorter ones are not halved, which takes as long as it saves.
_SHORTEST_HALVED = 256


def serves(length: Any) -> bool:
    """Returns whether a length is transformed on OpenVINO; a symbolic one is not."""
    return isinstance(length, int) and (_is_power_of_2(length) or 0 < length <= _LONGEST_PRODUCT)


def serves_open(length: Any, normalization: int) -> bool:
    """Returns whether a real transform of a symbolic length is: torch's equals OpenVINO's without a factor."""
    return normalization == 0 and _is_power_of_2(example_of(length))


def _is_power_of_2(length: int) -> bool:
    return length > 0 and length & (length - 1) == 0


def _factor(normalization: int, lengths: Sequence[int]) -> float:
    """Returns what the sums of a transform are multiplied by."""
    return math.prod(lengths) ** {0: 0.0, 1: -0.5, 2: -1.0}[normalization]


def convert_r2c(
    x: Output, dim: Sequence[int], normalization: int, onesided: bool, *, sizes: Sequence[int]
) -> tuple[Output, Output]:
    """Builds torch._fft_r2c from OpenVINO operations; ``sizes`` are those of the dimensions ``dim``.

    Returns:
        The real and the imaginary parts.
    """
    factor, length = _factor(normalization, sizes) if all(sizes) else 1.0, sizes[-1]
    if 0 < length <= _LONGEST_PRODUCT:
        parts = _real_products(x, dim[-1], length, factor)
        if not onesided:
            real, imaginary = parts
            opposite = ops.negative(imaginary).output(0)
            parts = (
                _completed(real, real, dim[-1], length), _completed(imaginary, opposite, dim[-1], length),
            )  # fmt: skip
    elif onesided:
        parts = _scaled(_parts(ops.rdft(x, int64([dim[-1]]))), factor)
    else:
        nothing = ops.multiply(x, np.float32(0)).output(0)
        parts = _scaled(_by_openvino((x, nothing), dim[-1], True), factor)
    return _transformed(parts, dim[:-1], sizes[:-1], forward=True)


def convert_c2c(
    real: Output, imaginary: Output, dim: Sequence[int], normalization: int, forward: bool, *, sizes: Sequence[int]
) -> tuple[Output, Output]:
    """Builds torch._fft_c2c in the same way."""
    return _transformed((real, imaginary), dim, sizes, forward, _factor(normalization, sizes))


def convert_c2r(
    real: Output, imaginary: Output, dim: Sequence[int], normalization: int, last: int, *, sizes: Sequence[int]
) -> Any:
    """Builds torch._fft_c2r in the same way; returns the real tensor."""
    parts = _transformed((real, imaginary), dim[:-1], sizes[:-1], forward=False)
    factor = _factor(normalization, [*sizes[:-1], last])
    if last > _LONGEST_PRODUCT:
        pairs = ops.irdft(_pairs(_scaled(parts, factor * last)), int64([dim[-1]]), int64([last]))
        return pairs.output(0)
    cosines, sines = _waves(last, sizes[-1])
    # All frequencies but the first (and the middle one of an even length) stand for two.
    frequencies = np.arange(sizes[-1])
    weights = np.where((frequencies == 0) | (2 * frequencies == last), 1, 2)[:, None] * factor
    half = last // 2 + 1
    even = _product(parts[0], dim[-1], cosines.T[:, :half] * weights)
    odd = _product(parts[1], dim[-1], sines.T[:, :half] * weights)
    return _both_halves(even, odd, dim[-1], last)


def _transformed(parts: _Parts, dim: Sequence[int], sizes: Sequence[int], forward: bool, factor: float = 1.0) -> _Parts:
    """Transforms along dimensions; the sums are multiplied by a factor."""
    for axis, size in zip(dim, sizes, strict=True):
        if size <= _LONGEST_PRODUCT:
            parts = _complex_products(parts, axis, size, forward, factor)
        else:
            parts = _by_openvino(_scaled(parts, factor), axis, forward)
            parts = parts if forward else _scaled(parts, size)
        factor = 1.0
    return parts if factor == 1.0 else _scaled(parts, factor)


def _real_products(x: Output, axis: int, length: int, factor: float) -> _Parts:
    """Transforms real values; returns the first half of the results."""
    cosines, sines = _waves(length, length // 2 + 1)
    even, odd, rows, weights = _halves(x, axis, length)
    return (
        _product(even, axis, cosines[:rows] * weights * factor), _product(odd, axis, sines[:rows] * factor),
    )  # fmt: skip


def _complex_products(parts: _Parts, axis: int, length: int, forward: bool, factor: float) -> _Parts:
    """Transforms complex values: ``(a + ib)(c + is)`` is even in ``ac`` and ``bc``, and odd in ``as`` and ``bs``."""
    if length == 1:
        return _scaled(parts, factor)
    cosines, sines = _waves(length, length // 2 + 1)
    sines = sines if forward else -sines
    (a_even, a_odd, rows, weights), (b_even, b_odd, *_) = (_halves(part, axis, length) for part in parts)
    c, s = cosines[:rows] * weights * factor, sines[:rows] * factor
    minus_bs = _product(b_odd, axis, -s)
    real = _both_halves(_product(a_even, axis, c), minus_bs, axis, length)
    return real, _both_halves(_product(b_even, axis, c), _product(a_odd, axis, s), axis, length)


def _halves(x: Output, axis: int, length: int) -> tuple[Output, Output, int, Any]:
    """Adds and subtracts the values at j and ``length - j``, if that is worth it.

    Returns:
        The sums, the differences, how many there are, and the weights of the sums: some are twice the value. Without
        halving, both are the values themselves.
    """
    if length < _SHORTEST_HALVED:
        return x, x, length, 1.0
    rows = np.arange(length // 2 + 1)
    weights = np.where((rows == 0) | (2 * rows == length), 0.5, 1.0)[:, None]
    first = ops.slice(x, int64([0]), int64([len(rows)]), int64([1]), int64([axis]))
    last = ops.gather(x, int64(list(-rows % length)), int64(axis))
    return ops.add(first, last).output(0), ops.subtract(first, last).output(0), len(rows), weights


def _both_halves(even: Output, odd: Output, axis: int, length: int) -> Output:
    """Returns all results, of which the even parts are equal at k and ``length - k``, and the odd ones opposite."""
    return _completed(ops.add(even, odd).output(0), ops.subtract(even, odd).output(0), axis, length)


def _completed(first: Output, other: Output, axis: int, length: int) -> Output:
    """Appends the second half of results: the value at k is what ``other``, a first half, has at ``length - k``."""
    if length <= 2:
        return first
    indices = int64(list(range((length - 1) // 2, 0, -1)))
    return ops.concat([first, ops.gather(other, indices, int64(axis))], axis).output(0)


def _waves(length: int, frequencies: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the parts of exp(-2 pi i j k / length) of the definition, in float64: ``[length, frequencies]``."""
    # j k is reduced modulo the length first, so that no digits are lost.
    angles = np.outer(np.arange(length), np.arange(frequencies)) % length * (-2 * np.pi / length)
    return np.cos(angles), np.where(2 * angles % (2 * np.pi) == 0, 0, np.sin(angles))


def _product(x: Output, axis: int, matrix: np.ndarray) -> Output:
    """Multiplies the values along an axis by a matrix ``[values, results]``, without moving the axis."""
    behind = rank(x) - 1 - axis
    if behind == 0:
        return ops.matmul(x, ops.constant(matrix.astype(np.float32)), False, False).output(0)
    left = ops.constant(np.ascontiguousarray(matrix.T).astype(np.float32))
    if behind == 1:
        return ops.matmul(left, x, False, False).output(0)
    flat = ops.reshape(x, int64([0] * axis + [matrix.shape[0], -1]), True)
    sizes, first = ops.shape_of(x), int64(0)
    before, after = (ops.gather(sizes, int64(list(axes)), first) for axes in (range(axis), range(axis + 1, rank(x))))
    return ops.reshape(
        ops.matmul(left, flat, False, False), ops.concat([before, int64([matrix.shape[1]]), after], 0), False
    ).output(0)


def _by_openvino(parts: _Parts, axis: int, forward: bool) -> _Parts:
    """Transforms by OpenVINO's own operator, which divides by the length on the way back."""
    return _parts((ops.dft if forward else ops.idft)(_pairs(parts), int64([axis])))


def _pairs(parts: _Parts) -> Output:
    return ops.concat([ops.unsqueeze(part, int64([-1])) for part in parts], -1).output(0)


def _parts(pairs: Any) -> _Parts:
    return ops.gather(pairs, int64(0), int64(-1)).output(0), ops.gather(pairs, int64(1), int64(-1)).output(0)


def _scaled(parts: _Parts, factor: float) -> _Parts:
    if factor == 1.0:
        return parts
    return ops.multiply(parts[0], np.float32(factor)).output(0), ops.multiply(parts[1], np.float32(factor)).output(0)


def facts(node: Node) -> dict[str, Any]:
    """Returns the sizes of the transformed dimensions; 0 for one that is symbolic."""
    source, dim = node.args[0], next(arg for arg in node.args if isinstance(arg, (list, tuple)))
    assert isinstance(source, Node)
    shape = value_of(source).shape
    return {"sizes": [shape[axis] if isinstance(shape[axis], int) else 0 for axis in dim]}
