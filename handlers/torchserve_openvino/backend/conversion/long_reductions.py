"""Computes long sums in blocks, since OpenVINO's CPU plugin adds a whole axis up in few float32 accumulators.

The error of such a sum grows with its length: 1e-6 for 16,000 values, 2e-2 for 4 million around 50; torch adds pairwise
(tests/contract pins it). In blocks of about the square root of the length, the error is that of one block, and 16,000
values and more take half the time. Shorter sums stay as they are, and so do the fusions of norms, which need one
reduction. Several axes may be long together, as in a mean over height and width: OpenVINO adds up each row by itself.

Axes of open length are limited instead (`lowering.sum_range`).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from torchserve_openvino.backend.conversion.constant_parts import constant_value, fold_known_shapes
from torchserve_openvino.backend.conversion.rewiring import put_behind
from torchserve_openvino.ops.openvino_values import int64

# Axes up to these lengths are added up at once, by reductions and by running sums.
LONGEST_SUM, LONGEST_RUNNING_SUM = 2**14, 2**12
# A norm over more values than this is composed of other operators, which are blocked.
LARGEST_NORM = 2**17
_SUMS: dict[str, Callable[..., ov.Node]] = {
    "ReduceSum": ops.reduce_sum, "ReduceMean": ops.reduce_mean, "ReduceL1": ops.reduce_l1, "ReduceL2": ops.reduce_l2,
}  # fmt: skip
_FLOATS = frozenset({ov.Type.f32, ov.Type.f16, ov.Type.bf16})


def block_long_reductions(model: ov.Model) -> None:
    """Replaces reductions, norms and running sums along long axes of known length, in place."""
    fold_known_shapes(model)
    changed = False
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MVN" and _normalizes_many(node):
            changed = True
            put_behind(node.output(0), _composed_norm)
    for node in model.get_ordered_ops():
        if node.get_type_name() not in {*_SUMS, "CumSum"} or node.get_element_type() not in _FLOATS:
            continue
        running = node.get_type_name() == "CumSum"
        if _has_long_axes(node, LONGEST_RUNNING_SUM if running else LONGEST_SUM):
            changed = True
            put_behind(node.output(0), _running_sum if running else _sum)
    if changed:
        model.validate_nodes_and_infer_types()


def _axes(node: ov.Node) -> list[int]:
    """Returns the axes that a node reduces, from the first; none if they are not known."""
    axes, rank = constant_value(node.input_value(1)), len(node.get_input_partial_shape(0))
    return [] if axes is None else sorted(int(axis) % rank for axis in np.ravel(axes))


def _has_long_axes(node: ov.Node, longest: int) -> bool:
    """Returns True if a node reduces an axis of more than ``longest`` values."""
    value = node.input_value(0)
    if value.get_partial_shape().rank.is_dynamic:
        return False
    long = {axis for axis in range(len(value.get_partial_shape())) if _length(value, axis) > longest}
    return bool(long) and not long.isdisjoint(_axes(node))


def _normalizes_many(node: ov.Node) -> bool:
    value = node.input_value(0)
    return value.get_partial_shape().is_static and _size(value, _axes(node)) > LARGEST_NORM


def _length(value: ov.Output, axis: int) -> int:
    """Returns the length of an axis; 0 if it is open."""
    dimension = value.get_partial_shape()[axis]
    return int(dimension.get_length()) if dimension.is_static else 0


def _size(value: ov.Output, axes: Sequence[int]) -> int:
    return math.prod(_length(value, axis) for axis in axes) if axes else 0


def _blocks(length: int, longest: int) -> tuple[int, int]:
    """Returns the number of blocks and the length of each; together they may be longer than the axis."""
    middle = math.isqrt(length)
    for blocks in range(middle, max(1, length // longest), -1):
        if length % blocks == 0:
            return blocks, length // blocks
    return math.ceil(length / middle), middle


def _in_blocks(value: ov.Output, axis: int, longest: int) -> ov.Output:
    """Splits an axis into two, behind zeros if its length has no fitting divisor."""
    shape, length = value.get_partial_shape(), _length(value, axis)
    blocks, size = _blocks(length, longest)
    if blocks * size > length:
        after = [0] * len(shape)
        after[axis] = blocks * size - length
        zero = ops.convert(ops.constant(np.float32(0)), value.get_element_type())
        value = ops.pad(value, int64([0] * len(shape)), int64(after), "constant", zero).output(0)
    sizes = ops.shape_of(value)
    first = ops.constant(np.int64(0))
    parts = [int64([blocks, size])]
    if axis:
        parts.insert(0, ops.gather(sizes, int64(list(range(axis))), first))
    if axis + 1 < len(shape):
        parts.append(ops.gather(sizes, int64(list(range(axis + 1, len(shape)))), first))
    return ops.reshape(value, ops.concat(parts, 0), False).output(0)


def _sum(result: ov.Output) -> ov.Node:
    """Returns a reduction with its long axes in blocks."""
    node = result.get_node()
    value, kind, axes = node.input_value(0), node.get_type_name(), _axes(node)
    count, padded, inside, outside = _size(value, axes), False, list[int](), list[int]()
    for axis in reversed(axes):
        length = _length(value, axis)
        outside = [axis, *outside]
        if length > LONGEST_SUM:
            value = _in_blocks(value, axis, LONGEST_SUM)
            padded |= math.prod(_blocks(length, LONGEST_SUM)) > length
            outside, inside = [axis, *(each + 1 for each in outside[1:])], [axis + 1, *(each + 1 for each in inside)]
    divides = padded and kind == "ReduceMean"
    reduce = _SUMS["ReduceSum" if divides else kind]
    # The first keeps its axes: OpenVINO joins two reductions that both keep them, or both drop them.
    found = reduce(reduce(value, int64(inside), True), int64(sorted(outside + inside)), False)
    if divides:
        found = ops.divide(found, ops.convert(ops.constant(np.float32(count)), result.get_element_type()))
    if node.get_attributes()["keep_dims"]:
        found = ops.unsqueeze(found, int64(axes))
    found.set_friendly_name(node.get_friendly_name())
    return found


def _running_sum(result: ov.Output) -> ov.Node:
    """Returns a running sum as one within each block, plus that of all blocks before."""
    node = result.get_node()
    value, (axis,) = node.input_value(0), _axes(node)
    length, rank = _length(value, axis), len(value.get_partial_shape())
    inside = ops.cum_sum(_in_blocks(value, axis, LONGEST_RUNNING_SUM), ops.constant(np.int64(axis + 1)))
    totals = ops.gather(inside, int64([-1]), ops.constant(np.int64(axis + 1)))
    before = ops.cum_sum(totals, ops.constant(np.int64(axis)), exclusive=True)
    order = [*range(axis), -1, *range(axis + 2, rank + 1)]
    sizes, first = ops.shape_of(inside), ops.constant(np.int64(0))
    flat = [int64([-1]) if each < 0 else ops.gather(sizes, int64([each]), first) for each in order]
    found = ops.reshape(ops.add(inside, before), ops.concat(flat, 0) if len(flat) > 1 else flat[0], False)
    if math.prod(_blocks(length, LONGEST_RUNNING_SUM)) > length:
        found = ops.slice(found, int64([0]), int64([length]), int64([1]), int64([axis]))
    found.set_friendly_name(node.get_friendly_name())
    return found


def _composed_norm(result: ov.Output) -> ov.Node:
    """Returns a mean-variance normalization composed of means."""
    node = result.get_node()
    value, axes, given = node.input_value(0), int64(_axes(node)), node.get_attributes()
    # Not one that OpenVINO composes back to the norm: the reductions become reductions in blocks.
    centered = ops.subtract(value, ops.reduce_mean(value, axes, True))
    if not given["normalize_variance"]:
        return centered
    variance = ops.reduce_mean(ops.multiply(centered, centered), axes, True)
    eps = ops.convert(ops.constant(np.float32(given["eps"])), result.get_element_type())
    if given["eps_mode"].lower() == "inside_sqrt":
        return ops.divide(centered, ops.sqrt(ops.add(variance, eps)))
    return ops.divide(centered, ops.add(ops.sqrt(variance), eps))
