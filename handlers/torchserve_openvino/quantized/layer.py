"""A linear layer in few bits, and the packing of such numbers: the common form of all formats."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.uint8]


@dataclass(frozen=True)
class QuantizedLinear:
    """A weight in few bits: ``weight[row, column] = (values - zero_points[group]) * scales[group]``.

    Attributes:
        bits: 4 or 8.
        values: ``[out, in]``, 0 to ``2**bits - 1``.
        zero_points: ``[out, groups]``, 0 to ``2**bits - 1``.
        scales: ``[out, groups]``, float16 or float32.
        groups: ``[in]``: the group of each column.
    """

    bits: int
    values: Integers
    zero_points: Integers
    scales: NDArray[Any]
    groups: NDArray[np.int64]

    def dequantized(self) -> NDArray[np.float32]:
        """Returns the weight, ``[out, in]``: exact, but rounded to float32 once where the scales are float32."""
        # By blocks, since NumPy is slow to repeat a zero point and a scale for each column.
        blocked = self.blocked()
        weight = blocked.values.astype(np.float32)
        weight -= blocked.zero_points.astype(np.float32)[..., None]
        weight *= blocked.scales.astype(np.float32)[..., None]
        weight = weight.reshape(self.values.shape)
        if blocked.order is None:
            return weight
        dense = np.empty_like(weight)
        dense[:, blocked.order] = weight
        return dense

    def blocked(self) -> "Blocked":
        """Returns the weight with the columns of each group side by side, in blocks of equal size."""
        order = np.argsort(self.groups, kind="stable")
        # The last group may be shorter, and act-order may fill groups unevenly: a block lies in one group.
        size = int(np.gcd.reduce(np.bincount(self.groups)))
        owner = self.groups[order][::size]
        sorted_already = bool((order == np.arange(len(order))).all())
        values = self.values if sorted_already else self.values[:, order]
        return Blocked(
            self.bits,
            None if sorted_already else order.astype(np.int64),
            values.reshape(values.shape[0], len(owner), size),
            self.zero_points[:, owner],
            self.scales[:, owner],
        )


@dataclass(frozen=True)
class Blocked:
    """A weight in few bits whose groups are blocks of adjacent columns.

    Attributes:
        bits: 4 or 8.
        order: ``[in]``: which column of the layer each column here is; None if they are the same.
        values: ``[out, blocks, size]``.
        zero_points: ``[out, blocks]``.
        scales: ``[out, blocks]``, float16 or float32.
    """

    bits: int
    order: NDArray[np.int64] | None
    values: Integers
    zero_points: Integers
    scales: NDArray[Any]


def unpacked(words: NDArray[Any], bits: int) -> Integers:
    """Returns the numbers in words of 32 bits along the last axis, the lowest bits first.

    Args:
        words: ``[..., words]``, int32 or uint32.
        bits: 4 or 8.
    """
    octets = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    pairs = np.stack((octets & 0xF, octets >> 4), axis=-1)
    return pairs.reshape(*octets.shape[:-1], -1)


def packed(values: Integers, bits: int) -> Integers:
    """Returns numbers as bytes, the lowest bits first: the form of OpenVINO's constants of type u4 and u8.

    Args:
        values: Any shape, in row-major order; a last half byte is filled with 0.
        bits: 4 or 8.
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    if bits == 8:
        return flat
    if len(flat) % 2:
        flat = np.append(flat, np.uint8(0))
    low, high = flat[0::2], flat[1::2] << np.uint8(4)
    return np.bitwise_or(low, high, dtype=np.uint8)
