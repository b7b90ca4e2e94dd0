"""Repeats the operands of attention that OpenVINO's CPU plugin reads wrongly (OpenVINO 2026.4).

The plugin makes one kernel of attention and of the elementwise operators between and behind its products. It computes
each product in blocks of 32 rows and 64 columns (24 without AVX-512), and reads two kinds of operands wrongly:

- a column behind attention, one number per query, ``where(keep[:, None], attention, 0)``: wrong where there are more
  queries than a block has rows and a value fills two or more blocks of columns, in every precision;
- a row behind the first product, one number per key, ``scores + mask[None, :]``: NaN where that product is computed in
  bfloat16. It becomes part of the product's own kernel (`FuseBrgemmCPUPostops` in OpenVINO's sources), which it does
  not where the operand has more than one row.

So a column gets as many columns as the value, and a row as many rows as there are heads; the kernel stays one.

With static shapes it also makes the transpositions of the queries and of the result part of the kernel, ``[batch,
queries, heads, size]`` to ``[batch, heads, queries, size]`` and back. Where there are as many queries as heads, these
change no size, and the kernel ignores or confuses them, depending on which of them there are and on the precision. An
operator that changes nothing keeps them apart.

tests/contract/test_openvino_attention.py shows the faults.
"""

import math
from collections.abc import Iterator

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from torchserve_openvino.passes.ov.constant_parts import constant_value
from torchserve_openvino.passes.ov.fused_chains import is_constant, upstream
from torchserve_openvino.passes.ov.kernel_fusions import JOINS, MOVES, is_attention, rolled_by_nothing
from torchserve_openvino.passes.ov.rewiring import put_behind
from torchserve_openvino.passes.pass_context import PassContext

_ATTENTION = "ScaledDotProductAttention"
# Positions of its inputs.
_QUERY, _KEY, _MASK = 0, 1, 3
# What may stand between a product and a transposition in one kernel.
_BESIDE_EXCHANGES = (JOINS | MOVES) - {"Transpose"}
# Their one-dimensional operands lie along the second dimension, and are no rows.
_BY_CHANNEL = frozenset({"PRelu", "BatchNormInference"})
# A size that is not static.
_OPEN = -1


def repeat_attention_operands(model: ov.Model, _: PassContext) -> None:
    """Repeats the rows and columns that are operands of attention; changes the model in place."""
    repeated, changed = _Repeated(), False
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind == _ATTENTION and node.get_input_size() > _MASK:
            _repeat_mask(node, repeated)
        elif kind == "MatMul":
            ports = _joined_operands(node.output(0), until="Softmax")
            done = [_repeat_row(port, _sizes(port.get_node().output(0)), repeated) for port in ports]
            if not all(done):
                # The product has one row, so that its kernel alone costs little.
                put_behind(node.output(0), rolled_by_nothing)
        if kind in {"MatMul", _ATTENTION} and not is_constant(node.input_value(_KEY).get_node()):
            changed |= _keep_exchanges_apart(node)
        if kind in {"MatMul", _ATTENTION} and is_attention(node):
            for port in _joined_operands(node.output(0)):
                _repeat_column(port, repeated)
    if repeated or changed:
        model.validate_nodes_and_infer_types()


class _Repeated(dict[tuple[str, int, tuple[int, ...]], ov.Output]):
    """Repeated values by node, output and repeats: all layers share the one of their common mask."""

    def put(self, port: ov.Input, repeats: list[int]) -> None:
        """Repeats an operand along its dimensions."""
        source = port.get_source_output()
        key = (source.get_node().get_name(), source.get_index(), tuple(repeats))
        if key not in self:
            # Not a Broadcast: the plugin drops those in front of elementwise operators.
            self[key] = ops.tile(source, ops.constant(np.array(repeats, np.int64))).output(0)
        port.replace_source_output(self[key])


def _joined_operands(value: ov.Output, until: str = "") -> list[ov.Input]:
    """Returns the other operands of the elementwise operators that follow a value one after another.

    Args:
        value: Where to begin.
        until: Type of an operator that must end the chain; if it does not, nothing is returned.
    """
    operands: list[ov.Input] = []
    while len(users := list(value.get_target_inputs())) == 1:
        node, index = users[0].get_node(), users[0].get_index()
        kind = node.get_type_name()
        if kind == until:
            return operands
        if kind in JOINS:
            operands += [port for port in node.inputs() if port.get_index() != index and kind not in _BY_CHANNEL]
        elif kind not in MOVES or index != 0:
            break
        value = node.output(0)
    return [] if until else operands


def _keep_exchanges_apart(product: ov.Node) -> bool:
    """Separates a product of attention from the transpositions around it that change no size; True if there are any."""
    reached = upstream(product.input_value(_QUERY).get_node(), _BESIDE_EXCHANGES)
    before = [node for node in reached if _exchanges_equals(node)]
    for transpose in before:
        put_behind(transpose.output(0), rolled_by_nothing)
    behind = [node for node in _downstream(product) if _exchanges_equals(node)]
    for transpose in behind:
        transpose.input(0).replace_source_output(rolled_by_nothing(transpose.input_value(0)).output(0))
    return bool(before or behind)


def _downstream(product: ov.Node) -> Iterator[ov.Node]:
    """Yields the nodes that depend on a product, each once, up to those that no kernel of it contains."""
    waiting, seen = [product], set[str]()
    while waiting:
        for port in waiting.pop().output(0).get_target_inputs():
            node = port.get_node()
            if node.get_name() in seen:
                continue
            seen.add(node.get_name())
            yield node
            if node.get_type_name() in _BESIDE_EXCHANGES:
                waiting.append(node)


def _exchanges_equals(node: ov.Node) -> bool:
    if node.get_type_name() != "Transpose":
        return False
    order, sizes = constant_value(node.input_value(1)), _sizes(node.output(0))
    if order is None or _OPEN in sizes or sizes != _sizes(node.input_value(0)):
        return False
    return any(axis != source and sizes[axis] > 1 for axis, source in enumerate(np.ravel(order)))


def _repeat_mask(attention: ov.Node, repeated: _Repeated) -> None:
    """Repeats the mask of attention that is one row."""
    query, key = (_sizes(attention.input_value(position)) for position in (_QUERY, _KEY))
    if query and key and not _repeat_row(attention.input(_MASK), [*query[:-1], key[-2]], repeated):
        put_behind(attention.input_value(_QUERY), rolled_by_nothing)


def _repeat_row(port: ov.Input, scores: list[int], repeated: _Repeated) -> bool:
    """Repeats an operand that is one row of the scores, along a dimension where these have several.

    Returns:
        False if it is one row and the scores may have no more.
    """
    sizes = _sizes(port.get_source_output())
    if not sizes or _OPEN in sizes or math.prod(sizes) != sizes[-1]:
        return True
    # A single number is a row of one key.
    if not scores or scores[-1] not in ({sizes[-1], _OPEN} if sizes[-1] > 1 else {1}):
        return True
    several = [axis for axis, size in enumerate(scores[:-1]) if size > 1]
    if not several:
        return False
    # Heads rather than queries, which may be many more.
    axis = several[-2] if len(several) > 1 else several[-1]
    repeated.put(port, [size if at == axis else 1 for at, size in enumerate(scores)])
    return True


def _repeat_column(port: ov.Input, repeated: _Repeated) -> None:
    """Repeats an operand that is one column of a result with several rows and columns."""
    sizes, result = _sizes(port.get_source_output()), _sizes(port.get_node().output(0))
    if len(sizes) > 1 and result and sizes[-1] == 1 != sizes[-2] and result[-1] > 1:
        repeated.put(port, [*[1] * (len(sizes) - 1), result[-1]])


def _sizes(value: ov.Output) -> list[int]:
    """Returns the sizes of a value, `_OPEN` for those that are not static; nothing if the rank is not known."""
    shape = value.get_partial_shape()
    if shape.rank.is_dynamic:
        return []
    return [size.get_length() if size.is_static else _OPEN for size in shape]
