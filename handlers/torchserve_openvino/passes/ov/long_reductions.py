"""Keeps the digits of long sums, which OpenVINO's CPU plugin adds up in few float32 accumulators (OpenVINO 2026.4).

The error of such a sum grows with its length, up to 2e-2 for 4 million values around 50; torch adds pairwise
(tests/contract pins it). Which kernel adds depends on the axes:

- The last axis, alone or with others, is added up accurately up to some ten thousands of values, but for a tensor of
  one dimension. That one gets a second dimension, which is reduced too; 4 million values then take a tenth of the time.
  A logarithm of softmax has such a sum inside, and gets the dimension as well.
- Other axes are added up value by value. They are reduced in two steps, long ones in blocks, as are more values along
  the last axis.
- Running sums are computed in blocks, then added to that of all blocks before.
- A norm over more than a million values is composed of sums.

Axes of open length are limited instead (`ops.support`).
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from torchserve_openvino.ops.openvino_values import int64, zero
from torchserve_openvino.passes.ov.constant_parts import constant_value, fold_known_shapes
from torchserve_openvino.passes.ov.rewiring import put_behind
from torchserve_openvino.passes.pass_context import PassContext

# As many values are added up at once, by a running sum or along other axes than the last one.
LONGEST_SUM = 2**14
# As many are added up at once along the last axis: a million would have 50 times the error of torch.
LONGEST_ALONG_LAST = 2**16
# As many values does a norm take at once.
LONGEST_NORM = 2**20
# Shorter tensors stay as they are.
SHORTEST_ROW = 2**12
_SUMS: dict[str, Callable[..., ov.Node]] = {
    "ReduceSum": ops.reduce_sum, "ReduceMean": ops.reduce_mean, "ReduceL1": ops.reduce_l1, "ReduceL2": ops.reduce_l2,
}  # fmt: skip
_FLOATS = frozenset({ov.Type.f32, ov.Type.f16, ov.Type.bf16})


def keep_digits_of_sums(model: ov.Model, _: PassContext) -> None:
    """Replaces reductions, norms and running sums that would lose digits, in place."""
    fold_known_shapes(model)
    norms = [node for node in model.get_ordered_ops() if node.get_type_name() == "MVN" and _normalizes_many(node)]
    for node in norms:
        put_behind(node.output(0), _composed_norm)
    replaced = list(_replacements(model))
    for node, replacement in replaced:
        put_behind(node.output(0), replacement)
    if norms or replaced:
        model.validate_nodes_and_infer_types()


def _replacements(model: ov.Model) -> Iterator[tuple[ov.Node, Callable[[ov.Output], ov.Node]]]:
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind not in {*_SUMS, "CumSum", "LogSoftmax"} or node.get_element_type() not in _FLOATS:
            continue
        shape = node.get_input_partial_shape(0)
        if shape.rank.is_dynamic or (shape.is_static and math.prod(shape.to_shape()) <= SHORTEST_ROW):
            continue
        if kind == "LogSoftmax":
            if len(shape) == 1:
                yield node, _log_softmax_of_row
        elif kind == "CumSum":
            attributes = node.get_attributes()
            if _count(node) > LONGEST_SUM and not attributes["exclusive"] and not attributes["reverse"]:
                yield node, _running_sum
        elif _count(node) > (LONGEST_ALONG_LAST if len(shape) - 1 in _axes(node) else LONGEST_SUM):
            yield node, _sum_in_two_steps
        elif len(shape) == 1:
            yield node, _sum_of_row


def _axes(node: ov.Node) -> list[int]:
    """Returns the axes that a node reduces, from the first; none if they are not known."""
    axes, rank = constant_value(node.input_value(1)), len(node.get_input_partial_shape(0))
    return [] if axes is None else sorted(int(axis) % rank for axis in np.ravel(axes))


def _count(node: ov.Node) -> int:
    """Returns how many values a node adds up; 0 if a length is open."""
    shape, axes = node.get_input_partial_shape(0), _axes(node)
    lengths = [int(shape[axis].get_length()) if shape[axis].is_static else 0 for axis in axes]
    return math.prod(lengths) if lengths else 0


def _normalizes_many(node: ov.Node) -> bool:
    return node.get_input_partial_shape(0).rank.is_static and _count(node) > LONGEST_NORM


def _named(replacement: ov.Node, node: ov.Node) -> ov.Node:
    replacement.set_friendly_name(node.get_friendly_name())
    return replacement


# --- reductions ---------------------------------------------------------------------------------------------------


def _sum_of_row(result: ov.Output) -> ov.Node:
    """Returns the reduction of a tensor of one dimension as one of a matrix with one row."""
    node = result.get_node()
    reduced = _SUMS[node.get_type_name()](ops.unsqueeze(node.input_value(0), int64([0])), int64([0, 1]), False)
    return _named(ops.unsqueeze(reduced, int64([0])) if node.get_attributes()["keep_dims"] else reduced, node)


def _log_softmax_of_row(result: ov.Output) -> ov.Node:
    """Returns the logarithm of a softmax of a tensor of one dimension as that of a matrix with one row."""
    node = result.get_node()
    row = ops.log_softmax(ops.unsqueeze(node.input_value(0), int64([0])), 1)
    return _named(ops.squeeze(row, int64([0])), node)


def _blocks(length: int) -> tuple[int, int]:
    """Returns a number of blocks and their length, which hold an axis, with less than a block to spare."""
    middle = math.isqrt(length)
    for blocks in range(middle, max(1, length // LONGEST_SUM), -1):
        if length % blocks == 0:
            return blocks, length // blocks
    return math.ceil(length / middle), middle


def _in_blocks(value: ov.Output, axis: int) -> ov.Output:
    """Splits an axis into two: blocks, and what is in them. The last block may end with zeros."""
    shape = value.get_partial_shape()
    length = int(shape[axis].get_length())
    blocks, size = _blocks(length)
    if blocks * size > length:
        after = [0] * len(shape)
        after[axis] = blocks * size - length
        nothing = zero(value.get_element_type())
        value = ops.pad(value, int64([0] * len(shape)), int64(after), "constant", nothing).output(0)
    sizes, first = ops.shape_of(value), int64(0)
    before, behind = int64(range(axis)), int64(range(axis + 1, len(shape)))
    parts = [ops.gather(sizes, before, first), int64([blocks, size]), ops.gather(sizes, behind, first)]
    return ops.reshape(value, ops.concat(parts, 0), False).output(0)


def _sum_in_two_steps(result: ov.Output) -> ov.Node:
    """Returns a reduction as two: within blocks or along the last of its axes, and along the others."""
    node = result.get_node()
    value, kind, axes = node.input_value(0), node.get_type_name(), _axes(node)
    reduced, zeros = list[int](), 1.0
    for axis in reversed(axes):
        length = int(value.get_partial_shape()[axis].get_length())
        reduced = [axis, *reduced]
        if length > LONGEST_SUM:
            value = _in_blocks(value, axis)
            zeros *= math.prod(_blocks(length)) / length
            reduced = [axis, axis + 1, *(axis + 1 for axis in reduced[1:])]
    reduce = _SUMS[kind]
    # The first keeps its axes: OpenVINO joins two reductions that both keep them, or both drop them.
    total = reduce(reduce(value, int64(reduced[-1:]), True), int64(reduced), False)
    if kind == "ReduceMean" and zeros > 1:
        # The mean of the values and of the zeros behind them; float16 has neither large counts nor ratios close to 1.
        total = ops.multiply(ops.convert(total, ov.Type.f32), ops.constant(np.float32(zeros)))
        total = ops.convert(total, result.get_element_type())
    return _named(ops.unsqueeze(total, int64(axes)) if node.get_attributes()["keep_dims"] else total, node)


# --- running sums and norms ---------------------------------------------------------------------------------------


def _running_sum(result: ov.Output) -> ov.Node:
    """Returns a running sum as one within each block, plus that of all blocks before."""
    node = result.get_node()
    value, (axis,), length = node.input_value(0), _axes(node), _count(node)
    inside = ops.cum_sum(_in_blocks(value, axis), int64(axis + 1))
    totals = ops.gather(inside, int64([-1]), int64(axis + 1))
    joined = ops.add(inside, ops.cum_sum(totals, int64(axis), exclusive=True))
    sizes, first, rank = ops.shape_of(inside), int64(0), len(value.get_partial_shape())
    before, behind = int64(range(axis)), int64(range(axis + 2, rank + 1))
    parts = [ops.gather(sizes, before, first), int64([-1]), ops.gather(sizes, behind, first)]
    flat = ops.reshape(joined, ops.concat(parts, 0), False)
    if math.prod(_blocks(length)) > length:
        flat = ops.slice(flat, int64([0]), int64([length]), int64([1]), int64([axis]))
    return _named(flat, node)


def _composed_norm(result: ov.Output) -> ov.Node:
    """Returns a norm of mean and variance, composed of sums: OpenVINO would compose means back to a norm."""
    node = result.get_node()
    # float16 has neither the count nor most values of eps.
    value, axes, attributes = ops.convert(node.input_value(0), ov.Type.f32), int64(_axes(node)), node.get_attributes()
    count, eps = ops.constant(np.float32(_count(node))), ops.constant(np.float32(attributes["eps"]))
    centered = ops.subtract(value, ops.divide(ops.reduce_sum(value, axes, True), count))
    if attributes["normalize_variance"]:
        variance = ops.divide(ops.reduce_sum(ops.multiply(centered, centered), axes, True), count)
        inside = attributes["eps_mode"].lower() == "inside_sqrt"
        deviation = ops.sqrt(ops.add(variance, eps)) if inside else ops.add(ops.sqrt(variance), eps)
        centered = ops.divide(centered, deviation)
    return ops.convert(centered, result.get_element_type())
