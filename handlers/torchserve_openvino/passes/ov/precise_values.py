"""Keeps float32 where few digits would be none, in a model that OpenVINO computes in bfloat16.

bfloat16 has 8 bits: an angle of 300 is off by up to 1, so that its sine is any number. So is a difference of large
logarithms, whose exponential is then wrong by a factor; and OpenVINO's CPU plugin adds up running sums in bfloat16,
which stop to grow at 256 times what is added. Position embeddings, state space models and linear attention compute
these in float32 in eager PyTorch, also in bfloat16. They are few numbers, and cost little.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from torchserve_openvino.backend.upstream._openvino_private import keep_in_f32
from torchserve_openvino.ops.openvino_values import array_of, int64
from torchserve_openvino.passes.ov.fused_chains import upstream
from torchserve_openvino.passes.ov.kernel_fusions import MOVES
from torchserve_openvino.passes.ov.narrow_masks import rounds_to_bfloat16
from torchserve_openvino.passes.ov.rewiring import put_behind
from torchserve_openvino.passes.pass_context import PassContext

_ANGLES = frozenset({"Sin", "Cos"})
_PARTS = frozenset({"Concat", "Gather", "Pad", "Select", "Slice", "Split", "StridedSlice", "VariadicSplit"})
# A logarithm stays one, until it is an exponent.
_OF_LOGARITHMS = MOVES | _PARTS | {"Add", "CumSum", "Maximum", "Minimum", "Multiply", "Negative", "Subtract"}
# What makes other numbers of numbers. Products with weights are not among them: they round what they take.
_ELEMENTWISE = _OF_LOGARITHMS | _ANGLES | {
    "Abs", "Clamp", "Divide", "Exp", "Floor", "FloorMod", "Log", "Mod", "Power", "Round", "SoftPlus", "Sqrt",
}  # fmt: skip


def has_few_digits(context: PassContext) -> bool:
    """Returns True if the plugin may compute in bfloat16, or float16."""
    return rounds_to_bfloat16(context)


def keep_sensitive_values(model: ov.Model, _: PassContext) -> None:
    """Marks angles, running sums, exponents that are differences, and what they are computed of, in place."""
    marked = {
        value.get_name(): value for node in model.get_ordered_ops() for value in _sensitive(node) if _is_float(value)
    }
    for node in marked.values():
        keep_in_f32(node)
        if (write := _WRITTEN.get(node.get_type_name())) is not None:
            put_behind(node.output(0), write)


# --- as the plugin writes these operators itself: where it replaces them, the mark is lost ------------------------


def _sum_with_negative(difference: ov.Output) -> ov.Node:
    first, second = difference.get_node().input_values()
    return _marked(ops.add(_spread(first, second), _marked(ops.multiply(second, _number(-1, second)))), difference)


def _of_both(operator: Callable[..., ov.Node], result: ov.Output) -> ov.Node:
    first, second = result.get_node().input_values()
    return _marked(operator(_spread(first, second), _spread(second, first)), result)


def _quotient(result: ov.Output) -> ov.Node:
    first, second = result.get_node().input_values()
    if second.get_node().get_type_name() != "Constant":
        return _marked(ops.divide(_spread(first, second), second), result)
    return _marked(ops.multiply(first, _spread(ops.constant(1 / array_of(second.get_node())).output(0), first)), result)


def _reshaped(result: ov.Output) -> ov.Node:
    if result.get_partial_shape().is_dynamic:
        return result.get_node()
    return _marked(ops.reshape(result.get_node().input_value(0), int64(result.get_shape()), False), result)


_WRITTEN: dict[str, Callable[[ov.Output], ov.Node]] = {
    "Subtract": _sum_with_negative, "Multiply": partial(_of_both, ops.multiply), "Add": partial(_of_both, ops.add),
    "Divide": _quotient, "Unsqueeze": _reshaped, "Squeeze": _reshaped,
}  # fmt: skip


def _marked(node: ov.Node, result: ov.Output | None = None) -> ov.Node:
    if result is not None:
        node.set_friendly_name(result.get_node().get_friendly_name())
    keep_in_f32(node)
    return node


def _spread(value: ov.Output, beside: ov.Output) -> ov.Output:
    """Returns a number that is constant once for each element of a dimension, since of one the plugin makes a power."""
    node = value.get_node()
    if node.get_type_name() != "Constant" or math.prod(value.get_shape()) != 1:
        return value
    # One of more dimensions would give the result these, too.
    rank = beside.get_partial_shape().rank
    if rank.is_dynamic or len(value.get_shape()) > rank.get_length():
        return value
    return _number(float(array_of(node).reshape(())), beside).output(0)


def _number(number: float, beside: ov.Output) -> ov.Node:
    shape = beside.get_partial_shape()
    sizes = [size.get_length() if size.is_static else 0 for size in shape] if shape.rank.is_static else []
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    return ops.constant(np.full([] if dim is None else [sizes[dim], *[1] * (len(sizes) - dim - 1)], number, np.float32))


# --- which values -------------------------------------------------------------------------------------------------


def _sensitive(node: ov.Node) -> Iterator[ov.Node]:
    kind = node.get_type_name()
    if kind == "CumSum" or kind in _ANGLES:
        yield from (node for node in upstream(node, _ELEMENTWISE) if node.get_type_name() in _ELEMENTWISE)
    elif kind == "Exp":
        exponent = node.input_value(0).get_node()
        terms = [node for node in upstream(exponent, _OF_LOGARITHMS) if node.get_type_name() in _OF_LOGARITHMS]
        if any(term.get_type_name() in {"CumSum", "Subtract"} for term in terms):
            yield from (node, *terms)


def _is_float(node: ov.Node) -> bool:
    return bool(node.get_output_size()) and node.get_output_element_type(0) == ov.Type.f32
