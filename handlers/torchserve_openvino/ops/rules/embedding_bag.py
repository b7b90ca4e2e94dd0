"""nn.EmbeddingBag: rows of a table are put into bags, and each bag is reduced to one row.

Bags of one size (a 2-D input) and plain sums and means run on OpenVINO's own operators. With ``padding_idx``, and for
the maximum, each row is scattered to its bag. Each call checks (`passes.fx.index_range`) that offsets start at
0, and end at the length if the last one is included: for others, torch raises or its results differ.
"""

from typing import Any

import numpy as np
import torch
from openvino import Output
from openvino import opset15 as ops
from torch.fx import Node

from torchserve_openvino.ops.names import op_name, value_of
from torchserve_openvino.ops.openvino_values import int64
from torchserve_openvino.ops.registry import Bags, Index, Rule, declare
from torchserve_openvino.ops.symbolic_sizes import is_always_true

_SUM, _MEAN, _MAX = 0, 1, 2
_MODES = {_SUM: "sum", _MEAN: "mean"}


def _number(value: float, like: Output) -> Any:
    # A bfloat16 constant cannot be made from an infinity.
    return ops.convert(ops.constant(np.float32(value)), like.get_element_type().get_type_name())


def _columns(x: Any) -> Output:
    """Adds a last dimension."""
    return ops.unsqueeze(x, int64([-1])).output(0)


def _count(x: Any) -> Output:
    """Returns the size of the first dimension, as a tensor ``[1]``."""
    return ops.gather(ops.shape_of(x), int64([0]), ops.constant(np.int64(0))).output(0)


def _embedding_bag(
    table: Output,
    indices: Output,
    offsets: Output,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Output | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    *,
    regular: bool = False,
) -> tuple[Any, None, None, None]:
    """Builds the reduced bags; the three other outputs are only for gradients (`_for_gradients`).

    Args:
        table: ``[rows, features]``.
        indices: ``[length]``.
        offsets: Where each bag starts; with ``include_last_offset`` also ``length``, where the last one ends.
        regular: Whether all bags have the same size.
    """
    indices = ops.convert(indices, "i64").output(0)
    weights = per_sample_weights
    padded = padding_idx >= 0
    if regular:
        shape = ops.concat([_count(offsets), int64([-1])], 0)
        bags = ops.reshape(indices, shape, False).output(0)
        if weights is not None:
            weights = ops.reshape(weights, shape, False).output(0)
        if mode in _MODES and not padded:
            return ops.embedding_bag_packed(table, bags, weights, _MODES[mode]), None, None, None
        return _regular(table, bags, weights, mode, padding_idx), None, None, None
    offsets = ops.convert(offsets, "i64").output(0)
    if include_last_offset:
        offsets = ops.slice(offsets, int64([0]), int64([-1]), int64([1])).output(0)
    if mode in _MODES and not padded:
        return _whole(table, indices, offsets, weights, mode), None, None, None
    return _scattered(table, indices, offsets, weights, _kept(indices, padding_idx), mode), None, None, None


def _whole(table: Output, indices: Output, offsets: Output, weights: Output | None, mode: int) -> Any:
    """Appends a row and a bag: OpenVINO's operator rejects bags that start after the last row."""
    starts = ops.concat([offsets, _count(indices)], 0)
    arguments = {}
    if weights is not None:
        one = ops.broadcast(_number(1.0, weights), int64([1]))
        arguments["per_sample_weights"] = ops.concat([weights, one], 0)
    rows = ops.concat([indices, int64([0])], 0)
    bags = ops.embedding_bag_offsets(table, rows, starts, reduction=_MODES[mode], **arguments)
    return ops.slice(bags, int64([0]), int64([-1]), int64([1]), int64([0]))


def _kept(indices: Output, padding_idx: int) -> Output:
    return ops.not_equal(indices, ops.constant(np.int64(padding_idx))).output(0)


def _rows(table: Output, indices: Output, weights: Output | None, keep: Output, filling: float) -> Output:
    """Returns a row for each index, filled with ``filling`` for those that don't count."""
    rows = ops.gather(table, indices, ops.constant(np.int64(0)))
    if weights is not None:
        rows = ops.multiply(rows, _columns(weights))
    return ops.select(_columns(keep), rows, _number(filling, table)).output(0)


def _finished(reduced: Any, counts: Any, mode: int, table: Output) -> Any:
    """Turns sums into means if requested, and sets empty bags to 0.

    Args:
        counts: How many rows count in each bag, ``[bags]``.
    """
    if mode == _SUM:
        return reduced
    counts = _columns(ops.convert(counts, table.get_element_type().get_type_name()))
    if mode == _MEAN:
        return ops.divide(reduced, ops.maximum(counts, _number(1.0, table)))
    return ops.select(ops.greater(counts, _number(0.0, table)), reduced, _number(0.0, table))


def _regular(table: Output, bags: Output, weights: Output | None, mode: int, padding_idx: int) -> Any:
    keep = _kept(bags, padding_idx)
    rows = _rows(table, bags, weights, keep, -np.inf if mode == _MAX else 0.0)
    counts = ops.reduce_sum(ops.convert(keep, "f32"), int64([1]))
    reduce = ops.reduce_max if mode == _MAX else ops.reduce_sum
    return _finished(reduce(rows, int64([1])), counts, mode, table)


def _scattered(table: Output, indices: Output, offsets: Output, weights: Output | None, keep: Output, mode: int) -> Any:
    axis, one = ops.constant(np.int64(0)), ops.constant(np.int64(1))
    bags, length = _count(offsets), _count(indices)
    # A row's bag is the number of bags that start up to it, minus 1; a bag may start after the last row.
    places = ops.broadcast(ops.constant(np.int64(0)), ops.add(length, int64([1])))
    starts = ops.scatter_elements_update(places, offsets, ops.broadcast(one, bags), axis, reduction="sum")
    bag = ops.subtract(ops.cumsum(starts, axis), one)
    bag = ops.slice(bag, int64([0]), length, int64([1]))

    filling = -np.inf if mode == _MAX else 0.0
    rows = _rows(table, indices, weights, keep, filling)
    features = ops.gather(ops.shape_of(table), int64([1]), axis)
    empty = ops.broadcast(_number(filling, table), ops.concat([bags, features], 0))
    index = ops.broadcast(_columns(bag), ops.shape_of(rows))
    reduced = ops.scatter_elements_update(empty, index, rows, axis, reduction="max" if mode == _MAX else "sum")
    zeros = ops.broadcast(ops.constant(np.float32(0)), bags)
    counts = ops.scatter_elements_update(zeros, bag, ops.convert(keep, "f32"), axis, reduction="sum")
    return _finished(reduced, counts, mode, table)


def _for_gradients(node: Node) -> str | None:
    """Returns why bags are not converted, or None: outputs that only gradients need, or an unknown length."""
    if any(len(user.args) < 2 or user.args[1] != 0 for user in node.users if user.users):
        return f"outputs of {op_name(node.target)} beside the first are used, which only gradients need"
    if _includes_last(node) and not isinstance(_length(node), int):
        return "bags with a last offset, for which the length must be known"
    return None


def _length(node: Node) -> Any:
    """Returns how many rows are looked up; may be symbolic."""
    indices = node.args[1]
    assert isinstance(indices, Node)
    return value_of(indices).shape[0]


def _includes_last(node: Node) -> bool:
    """Returns whether the last offset is an end, not a start."""
    return bool(node.args[7] if len(node.args) > 7 else node.kwargs.get("include_last_offset", False))


def _facts(node: Node) -> dict[str, Any]:
    """Checks whether the offsets are those that `functional.embedding_bag` makes for bags of one size."""
    offsets = node.args[2]
    if _includes_last(node) or not isinstance(offsets, Node) or op_name(offsets.target) != "aten.arange.start_step":
        return {"regular": False}
    start, end, step = _sizes(offsets.args)
    length = _length(node)
    return {"regular": start == 0 and is_always_true(end == length) and is_always_true(end % step == 0)}


def _sizes(args: Any) -> list[Any]:
    return [value_of(arg) if isinstance(arg, Node) else arg for arg in args]


declare(
    Rule(
        convert=_embedding_bag,
        facts=_facts,
        limit=_for_gradients,
        index=Index(source=0, dim=None, index=1),
        bags=Bags(rows=1, offsets=2, includes_last=_includes_last),
    ),
    torch.ops.aten._embedding_bag.default,
    torch.ops.aten._embedding_bag_forward_only.default,
)
