"""Computes convolutions along an open length as matrix products, with channels last.

OpenVINO's convolutions have channels last. Where a length is symbolic, it reorders the result of each to channels
first, and moves them last again for a norm over the channels: 49 of 114 ms of the convolutions of a wav2vec 2.0
(OpenVINO 2026.4, 1.3 s of sound). As products of windows with the weights they take 69 ms, the windows 10 of them; with
a fixed length OpenVINO takes 74. With the windows, 30 s of sound need 0.7 GB, as in eager PyTorch; convolutions, 0.4.
"""

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from torchserve_openvino.ops.openvino_values import int64
from torchserve_openvino.passes.ov.fused_chains import is_constant
from torchserve_openvino.passes.ov.rewiring import put_behind
from torchserve_openvino.passes.pass_context import PassContext

# Batch, channels, length.
_RANK = 3
_SWAP = (0, 2, 1)
# The windows of a convolution may hold each number so many times, and each must be worth so many products.
_MOST_COPIES, _FEWEST_CHANNELS = 4, 64
# Elementwise operators of one value.
_OF_ONE = frozenset(
    {"Abs", "Clamp", "Elu", "Erf", "Exp", "Gelu", "HSwish", "Mish", "Relu", "Sigmoid", "SoftPlus", "Swish", "Tanh"}
)
_OF_TWO = frozenset({"Add", "Divide", "Multiply", "Subtract"})


def multiply_open_lengths(model: ov.Model, _: PassContext) -> None:
    """Replaces the convolutions whose length is open, in place, and the transpositions between them.

    Args:
        model: Any; without such a convolution it stays as it is.
    """
    convolutions = [node for node in model.get_ordered_ops() if _may_multiply(node)]
    if not convolutions:
        return
    for node in convolutions:
        put_behind(node.output(0), _as_product)
    for node in model.get_ordered_ops():
        if not node.get_input_size() or not _is_swap(source := node.input_value(0).get_node()):
            continue
        if _is_swap(node):
            for user in list(node.output(0).get_target_inputs()):
                user.replace_source_output(source.input_value(0))
        elif (operands := _before_swap(node, source.input_value(0))) is not None:
            # What comes after a swap may come before it as well, so that two swaps meet.
            node.set_arguments(operands)
            put_behind(node.output(0), _swap)
    model.validate_nodes_and_infer_types()


def _may_multiply(node: ov.Node) -> bool:
    """Checks whether a node is a convolution of an open length by constants, with windows that overlap little."""
    if node.get_type_name() != "Convolution":
        return False
    shape, weights, attributes = node.get_input_partial_shape(0), node.input_value(1).get_node(), node.get_attributes()
    if shape.rank.is_dynamic or len(shape) != _RANK or shape[2].is_static or attributes["auto_pad"] != "explicit":
        return False
    if weights.get_type_name() != "Constant" or weights.get_element_type() != ov.Type.f32:
        return False
    channels, _, size = weights.get_output_shape(0)
    return bool(channels >= _FEWEST_CHANNELS and size <= _MOST_COPIES * attributes["strides"][0])


def _as_product(result: ov.Output) -> ov.Node:
    """Returns what a convolution computes, as a swapped product ``[batch, length, channels]``."""
    node = result.get_node()
    attributes, value = node.get_attributes(), _swapped(node.input_value(0))
    weights = node.input_value(1).get_node().data
    channels, _, size = weights.shape
    (stride,), (dilation,) = attributes["strides"], attributes["dilations"]
    before, after = attributes["pads_begin"][0], attributes["pads_end"][0]
    if before or after:
        value = ops.pad(value, int64((0, before, 0)), int64((0, after, 0)), "constant", np.float32(0)).output(0)
    if size == stride == 1:
        windows = value
    else:
        # Of each window the first number, then the second, and so on.
        lasts = [(size - 1 - at) * dilation for at in range(size)]
        parts = [
            ops.slice(
                value, int64([at * dilation]), int64([-last if last else np.iinfo(np.int64).max]),
                int64([stride]), int64([1]),
            )
            for at, last in enumerate(lasts)
        ]  # fmt: skip
        windows = ops.concat(parts, axis=2).output(0)
    matrix = np.ascontiguousarray(weights.transpose(_SWAP)).reshape(channels, -1)
    product = ops.matmul(windows, ops.constant(matrix), False, True)
    product.set_friendly_name(node.get_friendly_name())
    return _swap(product.output(0))


def _before_swap(node: ov.Node, value: ov.Output) -> list[ov.Output] | None:
    """Returns what an elementwise operator takes before the last two dimensions are swapped; None if it is none."""
    kind = node.get_type_name()
    if kind in _OF_ONE:
        return [value]
    if kind in _OF_TWO and (other := _swapped_constant(node.input_value(1))) is not None:
        return [value, other]
    return None


def _swapped_constant(value: ov.Output) -> ov.Output | None:
    """Returns a constant with its last two dimensions swapped; None if it has another rank, or is no constant."""
    shape = value.get_partial_shape()
    if shape.is_dynamic or len(shape) > _RANK:
        return None
    sizes = [1] * (_RANK - len(shape)) + list(value.get_shape())
    # The shape of a bias is computed from that of the result, though only from its rank.
    node = value.get_node()
    source = node.input_value(0) if node.get_type_name() == "Reshape" else value
    if not is_constant(source.get_node()):
        return None
    return _swap(ops.reshape(source, int64(sizes), False).output(0)).output(0)


def _swapped(value: ov.Output) -> ov.Output:
    """Returns a value with its last two dimensions swapped, without doing so twice."""
    node = value.get_node()
    return node.input_value(0) if _is_swap(node) else _swap(value).output(0)


def _swap(value: ov.Output) -> ov.Node:
    return ops.transpose(value, int64(_SWAP))


def _is_swap(node: ov.Node) -> bool:
    if node.get_type_name() != "Transpose":
        return False
    order = node.input_value(1).get_node()
    return order.get_type_name() == "Constant" and tuple(np.ravel(order.data)) == _SWAP
