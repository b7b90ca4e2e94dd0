"""Puts operators into an ov.Model that OpenVINO's CPU plugin fuses or computes wrongly, as code of users may.

They go in just before the model is compiled, behind all repairs of this package, so that they stay faults however the
package repairs its own models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from torchserve_openvino.passes.ov.rewiring import put_behind

_LOWEST = np.float32(np.finfo(np.float32).min)
_MASK = 3
# Operators between the softmax of attention and its second product.
_BETWEEN = frozenset(
    {"Convert", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Broadcast", "Add", "Multiply", "Select"}
)

Change = Callable[[ov.Model], None]


def before_compiling(change: Change) -> Callable[[Any], Any]:
    """A replacement of a function that looks at each model before it is compiled."""

    def replacement(look: Any) -> Any:
        def changed(model: ov.Model) -> Any:
            change(model)
            model.validate_nodes_and_infer_types()
            return look(model)

        return changed

    return replacement


def clear_closed_rows(model: ov.Model) -> None:
    """Sets rows of attention whose mask forbids everything to 0 by a Select behind attention."""
    for node in _of_type(model, "ScaledDotProductAttention"):
        if node.get_input_size() <= _MASK or len(node.get_input_partial_shape(_MASK)) < 2:
            continue
        mask = node.input_value(_MASK)
        if mask.get_element_type() == ov.Type.boolean:
            allowed = mask
        else:
            allowed = ops.not_equal(mask, _number(-np.inf, mask)).output(0)
        rows = ops.reduce_logical_or(allowed, ops.constant(np.array([-1])), True)
        put_behind(node.output(0), lambda value, rows=rows: ops.select(rows, value, _number(0, value)))  # type: ignore[misc]


def select_behind_products(model: ov.Model) -> None:
    """Keeps the rows of hand-written attention by a Select of one number per query, here all of them."""
    for node in _of_type(model, "MatMul"):
        weights = node.input_value(0)
        if not _is_softmax(weights):
            continue
        sums = ops.reduce_max(weights, ops.constant(np.array([-1])), True)
        keeps = ops.greater_equal(sums, _number(0, weights))
        put_behind(node.output(0), lambda value, keeps=keeps: ops.select(keeps, value, _number(0, value)))  # type: ignore[misc]


def add_row_to_scores(model: ov.Model) -> None:
    """Adds one row of zeros to the scores of hand-written attention, as a mask of shape [1, 1, 1, length]."""
    for node in _of_type(model, "Softmax"):
        scores = node.input_value(0)
        rank = scores.get_partial_shape().rank
        if rank.is_dynamic or rank.get_length() != 4 or scores.get_node().get_type_name() == "Parameter":
            continue
        largest = ops.reduce_max(scores, ops.constant(np.array([0, 1, 2])), True)
        zeros = ops.multiply(ops.convert(ops.is_nan(largest), scores.get_element_type()), _number(0, scores))
        node.input(0).replace_source_output(ops.add(scores, zeros).output(0))


def bound_pools(model: ov.Model) -> None:
    """Makes -inf the lowest number in the answers of a model that pools."""
    if not _of_type(model, "MaxPool"):
        return
    for result in model.get_results():
        value = result.input_value(0)
        if value.get_element_type() == ov.Type.f32:
            lowest = ops.constant(_LOWEST)
            result.input(0).replace_source_output(ops.maximum(value, lowest).output(0))


def _of_type(model: ov.Model, name: str) -> list[ov.Node]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() == name]


def _number(value: float, like: ov.Output) -> ov.Node:
    return ops.constant(np.array(value, like.get_element_type().to_dtype()))


def _is_softmax(value: ov.Output) -> bool:
    while (kind := value.get_node().get_type_name()) in _BETWEEN:
        value = value.get_node().input_value(0)
    return bool(kind == "Softmax")
