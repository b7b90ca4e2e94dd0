"""nn.EmbeddingBag: rows of a table are put into bags, and each bag is reduced to one row.

Sums and means run on OpenVINO's own operators, and the maximum is a scatter of rows. Measured on one core (512 bags of
50 rows on average, a table of 100,000 x 64): a sum takes 1.0 ms (0.4 in eager PyTorch, which prefetches rows; with a
``padding_idx`` 1.7), a maximum 2.1 ms (4.3). A scatter of single elements takes 10 to 16 ms, and a product with a
matrix of which row is in which bag 28.

OpenVINO's operators add up all rows of a bag. With ``padding_idx``, some do not count: nothing is to be done where that
row of the table is 0, as it is unless a user writes there; the row's weight is 0 where it is a finite constant; and
otherwise, rows are looked up and replaced first.

Each call checks (`passes.fx.index_range`) that offsets start at 0, and end at the length if the last one is included:
for others, torch raises or its results differ.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from openvino import Output, Type
from openvino import opset15 as ops
from torch.fx import Node

from torchserve_openvino.ops.names import op_name, value_of
from torchserve_openvino.ops.openvino_values import array_of, int64
from torchserve_openvino.ops.rule_registry import Bags, Index, Rule, declare
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


@dataclass(frozen=True)
class _BagRows:
    """The rows that are put into bags.

    Attributes:
        table: ``[rows, features]``.
        indices: Which rows.
        weights: Factors of the rows, shaped like ``indices``; None for 1.
        keep: Which of them count, shaped like ``indices``; None for all.
        masked: Whether rows that don't count must be replaced, since they are not 0 with these weights.
    """

    table: Output
    indices: Output
    weights: Output | None
    keep: Output | None
    masked: bool

    def summed_directly(self) -> bool:
        """Returns whether OpenVINO's operators take the rows as they are.

        Weights of an open length fail to compile (tests/contract/test_openvino.py).
        """
        return not self.masked and (self.weights is None or self.weights.get_partial_shape().is_static)

    def looked_up(self, filling: float) -> Output:
        """Returns a row for each index, ``filling`` for those that don't count."""
        rows = ops.gather(self.table, self.indices, ops.constant(np.int64(0)))
        if self.weights is not None:
            rows = ops.multiply(rows, _columns(self.weights))
        if self.keep is not None and self.masked:
            rows = ops.select(_columns(self.keep), rows, _number(filling, self.table))
        return rows.output(0)

    def reshaped(self, shape: Any) -> "_BagRows":
        """Returns the same rows with another shape."""
        indices, weights, keep = (
            None if tensor is None else ops.reshape(tensor, shape, False).output(0)
            for tensor in (self.indices, self.weights, self.keep)
        )
        return replace(self, indices=indices, weights=weights, keep=keep)

    def with_another(self) -> "_BagRows":
        """Appends a row to all, which no bag gets: OpenVINO's operator rejects bags that start after the last row."""
        indices, weights, keep = ops.concat([self.indices, int64([0])], 0).output(0), self.weights, self.keep
        if weights is not None:
            weights = ops.concat([weights, ops.broadcast(_number(1.0, weights), int64([1]))], 0).output(0)
        if keep is not None:
            keep = ops.concat([keep, ops.constant(np.array([False]))], 0).output(0)
        return replace(self, indices=indices, weights=weights, keep=keep)


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
    rows = _rows(table, indices, per_sample_weights, mode, padding_idx)
    if regular:
        return _regular(rows.reshaped(ops.concat([_count(offsets), int64([-1])], 0)), mode), None, None, None
    starts = ops.convert(offsets, "i64").output(0)
    if include_last_offset:
        starts = ops.slice(starts, int64([0]), int64([-1]), int64([1])).output(0)
    return (_maxima if mode == _MAX else _sums)(rows, starts, mode), None, None, None


def _rows(table: Output, indices: Output, weights: Output | None, mode: int, padding_idx: int) -> _BagRows:
    if padding_idx < 0:
        return _BagRows(table, indices, weights, None, masked=False)
    keep = ops.not_equal(indices, ops.constant(np.int64(padding_idx))).output(0)
    padding = _constant_row(table, padding_idx)
    if mode == _MAX or padding is None or not np.isfinite(padding).all():
        return _BagRows(table, indices, weights, keep, masked=True)
    if weights is not None:
        weights = ops.select(keep, weights, _number(0.0, weights)).output(0)
    elif padding.any():
        weights = ops.convert(keep, table.get_element_type().get_type_name()).output(0)
    return _BagRows(table, indices, weights, keep, masked=False)


def _constant_row(table: Output, row: int) -> np.ndarray | None:
    """Returns a row of a table; None if it is no constant, or one that NumPy has no type for."""
    node = table.get_node()
    if node.get_type_name() != "Constant" or node.get_element_type() == Type.bf16:
        return None
    return np.asarray(array_of(node)[row])


def _regular(rows: _BagRows, mode: int) -> Any:
    """Reduces bags of one size, a row of indices for each."""
    if mode != _MAX and rows.summed_directly():
        kind = _MODES[mode] if rows.keep is None else "sum"
        reduced = ops.embedding_bag_packed(rows.table, rows.indices, rows.weights, kind)
        if rows.keep is None or mode == _SUM:
            return reduced
    else:
        reduce = ops.reduce_max if mode == _MAX else ops.reduce_sum
        reduced = reduce(rows.looked_up(-np.inf if mode == _MAX else 0.0), int64([1]))
    if rows.keep is None:
        sizes = ops.gather(ops.shape_of(rows.indices), int64([1]), ops.constant(np.int64(0)))
        counts = ops.broadcast(sizes, _count(rows.indices))
    else:
        counts = ops.reduce_sum(ops.convert(rows.keep, "i32"), int64([1]))
    return _finished(reduced, counts, mode, rows.table)


def _sums(rows: _BagRows, starts: Output, mode: int) -> Any:
    """Adds up bags of any sizes, or averages them."""
    bags = ops.concat([starts, _count(rows.indices)], 0).output(0)
    rows = rows.with_another()
    kind = _MODES[mode] if rows.keep is None else "sum"
    if rows.summed_directly():
        reduced = _bags(rows.table, rows.indices, bags, kind, rows.weights)
    else:
        reduced = _bags(rows.looked_up(0.0), _numbers_of(rows.indices), bags, kind)
    if rows.keep is None or mode == _SUM:
        return reduced
    return _finished(reduced, _kept_in_bags(rows.keep, bags), mode, rows.table)


def _maxima(rows: _BagRows, starts: Output, mode: int) -> Any:
    """Takes the maximum of bags of any sizes."""
    axis, one = ops.constant(np.int64(0)), ops.constant(np.int64(1))
    bags, length = _count(starts), _count(rows.indices)
    # A row's bag is the number of bags that start up to it, minus 1; a bag may start after the last row.
    marks = ops.broadcast(ops.constant(np.int64(0)), ops.add(length, int64([1])))
    marks = ops.scatter_elements_update(marks, starts, ops.broadcast(one, bags), axis, reduction="sum")
    bag = ops.slice(ops.subtract(ops.cumsum(marks, axis), one), int64([0]), length, int64([1]))
    features = ops.gather(ops.shape_of(rows.table), int64([1]), axis)
    empty = ops.broadcast(_number(-np.inf, rows.table), ops.concat([bags, features], 0))
    reduced = ops.scatter_nd_update(empty, _columns(bag), rows.looked_up(-np.inf), "max")
    if rows.keep is None:
        after = ops.slice(starts, int64([1]), int64([np.iinfo(np.int64).max]), int64([1]))
        counts = ops.subtract(ops.concat([after, length], 0), starts)
    else:
        ends = ops.concat([starts, length], 0).output(0)
        counts = _kept_in_bags(ops.concat([rows.keep, ops.constant(np.array([False]))], 0).output(0), ends)
    return _finished(reduced, counts, mode, rows.table)


def _bags(table: Output, indices: Output, starts: Output, kind: str, weights: Output | None = None) -> Output:
    """Reduces bags, but for the last one, which nothing is put into."""
    arguments = {} if weights is None else {"per_sample_weights": weights}
    bags = ops.embedding_bag_offsets(table, indices, starts, reduction=kind, **arguments)
    return ops.slice(bags, int64([0]), int64([-1]), int64([1]), int64([0])).output(0)


def _numbers_of(x: Output) -> Output:
    """Returns 0, 1, 2 and so on, as many as a tensor ``[length]`` has elements."""
    length = ops.squeeze(_count(x), int64([0]))
    return ops.range(ops.constant(np.int64(0)), length, ops.constant(np.int64(1)), "i64").output(0)


def _kept_in_bags(keep: Output, starts: Output) -> Output:
    """Counts what is kept in each bag, in integers: bfloat16 counts to 256."""
    ones = _columns(ops.convert(keep, "i32"))
    return ops.squeeze(_bags(ones, _numbers_of(keep), starts, "sum"), int64([1])).output(0)


def _finished(reduced: Any, counts: Any, mode: int, table: Output) -> Any:
    """Turns sums into means if requested, and sets empty bags to 0.

    Args:
        counts: How many rows count in each bag, ``[bags]``.
    """
    if mode == _SUM:
        return reduced
    if mode == _MEAN:
        counts = ops.maximum(counts, ops.convert_like(ops.constant(np.int32(1)), counts))
        return ops.divide(reduced, _columns(ops.convert(counts, table.get_element_type().get_type_name())))
    is_empty = ops.equal(counts, ops.convert_like(ops.constant(np.int32(0)), counts))
    return ops.select(_columns(is_empty), _number(0.0, table), reduced)


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
