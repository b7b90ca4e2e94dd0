"""Keeps the sign of zero behind a product with a number, for tensors of open size (OpenVINO 2026.4).

The CPU plugin computes the negation of such a tensor, and its product with or quotient by a number, as ``a * x + 0``:
-0.0 becomes 0.0, and a division by it has the wrong sign of infinity. (Tensors of known size run as snippets, which
multiply.) It does so for a number that it knows when it compiles; a number that depends on a shape is multiplied. Only
values whose sign shows get one: those that reach a result, or a division, by operators that keep the sign of zero.
"""

import functools

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from torchserve_openvino.ops.openvino_values import int64
from torchserve_openvino.passes.ov.constant_parts import constant_value
from torchserve_openvino.passes.ov.rewiring import put_behind
from torchserve_openvino.passes.pass_context import PassContext

_FLOATS = frozenset({ov.Type.f32, ov.Type.f16, ov.Type.bf16})
# Return a zero of the sign of their input, if that is zero.
_KEEP_SIGNS = frozenset({
    "Asin", "Asinh", "Atan", "Atanh", "Ceiling", "Convert", "Erf", "Floor", "Multiply", "Negative", "Reshape", "Round",
    "Select", "Sign", "Sin", "Sinh", "Sqrt", "Squeeze", "Tan", "Tanh", "Transpose", "Unsqueeze",
})  # fmt: skip


def keep_signs_of_zero(model: ov.Model, _: PassContext) -> None:
    """Multiplies by numbers that depend on a shape where the sign of zero shows, in place."""
    scaled = [(node, number) for node in model.get_ordered_ops() if (number := _factor(node)) is not None]
    for node, number in scaled:
        if shows_sign_of_zero(node.output(0)):
            put_behind(node.output(0), functools.partial(_product, number))
    if scaled:
        model.validate_nodes_and_infer_types()


def _value_position(node: ov.Node) -> int:
    """Returns which input of a product is not the number."""
    return 1 if node.get_type_name() == "Multiply" and _number(node.input_value(1)) is None else 0


def _factor(node: ov.Node) -> float | None:
    """Returns the number by which a node of open shape multiplies its input; None if it does not."""
    kind = node.get_type_name()
    if kind not in {"Negative", "Multiply", "Divide"} or node.get_element_type() not in _FLOATS:
        return None
    if node.get_output_partial_shape(0).is_static:
        return None
    if kind == "Negative":
        return -1.0
    ranks = [output.get_partial_shape().rank for output in (node.input_value(_value_position(node)), node.output(0))]
    if any(rank.is_dynamic for rank in ranks) or ranks[0].get_length() != ranks[1].get_length():
        # A number of more dimensions than the value adds some.
        return None
    numbers = [_number(value) for value in node.input_values()]
    if kind == "Multiply":
        return next((number for number in numbers if number is not None), None)
    # Powers of 2 have exact reciprocals, which give the same quotients.
    divisor = numbers[1]
    return None if divisor is None or not divisor or np.frexp(divisor)[0] not in {0.5, -0.5} else 1 / divisor


def _number(value: ov.Output) -> float | None:
    shape = value.get_partial_shape()
    if shape.is_dynamic or int(np.prod(shape.to_shape())) != 1:
        return None
    known = constant_value(value)
    return None if known is None else float(np.ravel(known)[0])


def _product(number: float, result: ov.Output) -> ov.Node:
    """Returns a product with a number that OpenVINO does not know while it compiles."""
    node = result.get_node()
    value = node.input_value(_value_position(node))
    size = ops.gather(ops.shape_of(value), int64(0), int64(0))
    nothing = ops.convert(ops.minimum(size, int64(0)), value.get_element_type())
    return ops.multiply(
        value, ops.add(nothing, ops.convert(ops.constant(np.float32(number)), value.get_element_type()))
    )


def shows_sign_of_zero(value: ov.Output) -> bool:
    """Returns True if the sign of a zero reaches a result of the model or a division."""
    waiting, seen = [value], set()
    while waiting:
        for target in waiting.pop().get_target_inputs():
            node, kind = target.get_node(), target.get_node().get_type_name()
            if kind == "Result" or (kind in {"Divide", "Power"} and _divides_by(target)):
                return True
            if (kind in _KEEP_SIGNS or kind == "Divide") and node.get_name() not in seen:
                seen.add(node.get_name())
                waiting.append(node.output(0))
    return False


def _divides_by(target: ov.Input) -> bool:
    """Returns True if a quotient or a power divides by one of its inputs."""
    node = target.get_node()
    if node.get_type_name() == "Divide":
        return bool(target.get_index() == 1)
    exponent = _number(node.input_value(1))
    return exponent is None or exponent < 0
