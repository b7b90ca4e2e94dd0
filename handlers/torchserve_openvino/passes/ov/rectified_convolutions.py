"""Keeps the signs of what convolutions in 8 bits are multiplied with behind a ReLU (OpenVINO 2026.4, CPU).

The CPU plugin makes ``relu(conv(x)) * scale`` one kernel, and moves the scale in front of the ReLU, as if all of its
numbers were positive: ``relu(conv(x) * scale)``. A sum with ``-relu(conv(x))``, a subtraction and a batch normalization
behind a ReLU come to that as well, where the convolution has no bias and there is a number per channel. A clamp is not
moved. tests/contract/test_openvino_quantized.py shows it.
"""

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from torchserve_openvino.passes.ov.fused_chains import is_constant
from torchserve_openvino.passes.ov.kernel_fusions import CONVOLUTIONS, MOVES, is_dequantized
from torchserve_openvino.passes.pass_context import PassContext

# Through which OpenVINO moves the scale of integers.
_KEEP_INTEGERS = MOVES | {
    "Clamp", "Concat", "Gather", "MaxPool", "Multiply", "Pad", "PRelu", "Relu", "Slice", "Split", "StridedSlice",
    "Subtract", "VariadicSplit",
}  # fmt: skip


def clamp_rectified(model: ov.Model, _: PassContext) -> None:
    """Replaces ReLU and PReLU behind convolutions in 8 bits, in place."""
    for node in model.get_ordered_ops():
        if node.get_type_name() in {"Relu", "PRelu"} and _is_convolved_bytes(node.input_value(0)):
            value = node.input_value(0)
            positive = ops.clamp(value, 0.0, np.inf)
            if node.get_type_name() == "PRelu":
                negative = ops.multiply(ops.clamp(value, -np.inf, 0.0), _along_channels(node))
                positive = ops.add(positive, negative)
            positive.set_friendly_name(node.get_friendly_name())
            for user in node.output(0).get_target_inputs():
                user.replace_source_output(positive.output(0))


def _along_channels(node: ov.Node) -> ov.Node | ov.Output:
    """Returns the slopes of a PRelu, which stand along the second dimension."""
    slopes, rank = node.input_value(1), node.get_output_partial_shape(0).rank.get_length()
    if slopes.get_partial_shape().to_shape() in ([], [1]):
        return slopes
    return ops.reshape(slopes, ops.constant([1, -1, *[1] * (rank - 2)], ov.Type.i64), special_zero=False)


def _is_convolved_bytes(value: ov.Output) -> bool:
    """Checks whether a value is the result of a convolution in 8 bits, perhaps times constants."""
    node = value.get_node()
    while node.get_type_name() in MOVES | {"Multiply"}:
        if node.get_type_name() == "Multiply" and not is_constant(node.input_value(1).get_node()):
            return False
        node = node.input_value(0).get_node()
    # Weights first: behind those in floats, the data need not be followed.
    return node.get_type_name() in CONVOLUTIONS and all(
        map(_may_be_integers, (node.input_value(1), node.input_value(0)))
    )


def _may_be_integers(value: ov.Output) -> bool:
    """Checks whether OpenVINO may compute a value in 8 bits, from any of the values that it is made of."""
    waiting, seen = [value.get_node()], set()
    while waiting:
        node = waiting.pop()
        if is_dequantized(node) or node.get_type_name() == "FakeQuantize":
            return True
        if node.get_type_name() in _KEEP_INTEGERS and node.get_friendly_name() not in seen:
            seen.add(node.get_friendly_name())
            waiting += [operand.get_node() for operand in node.input_values()]
    return False
