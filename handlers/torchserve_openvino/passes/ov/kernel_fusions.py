"""Prevents operator fusions of OpenVINO's CPU plugin that crash it or give wrong results (OpenVINO 2026.4).

- With static shapes, attention (product, softmax, product, and the elementwise operators around them) and group
  normalization become one kernel each, and elementwise kernels are fused with each other. If such a fusion reaches one
  of these two and another kernel, the plugin accesses memory out of bounds while it compiles, and the process dies
  without a message: with attention if its result has several users or becomes larger by broadcasting, with group
  normalization if a user has a second input. An operator that changes nothing, placed after the result, prevents the
  fusion.
- A reduction of three dimensions is fused with a following product or sum with a constant, and the result is wrong:
  for integers only the first values are right, ``mask.sum(-1) - 1``; for floats with a number per channel, those of
  other channels are used, ``batch_norm(x.mean(-1))``. A division by a constant is wrong too, ``x.mean(-1) / 3``, also
  with more dimensions where OpenVINO drops some first. A reduction with two users is not fused. The product may also
  come from before the reduction: OpenVINO reduces 8-bit integers and scales the result, ``dequantize(x).mean(1)``.
  In the same way it clamps integers, with bounds that are rounded to integers, and takes the mean of them with padding
  of 0 instead of the zero point.
- The scale of a convolution or a product in 8 bits becomes part of its kernel. Where several operators use the result,
  OpenVINO gives each its own copy of the scale, and makes all copies part of the one kernel, so that each user gets a
  value scaled twice: ``x + x.flip(0)`` behind a convolution without bias. It does so where it does not fuse these
  copies with other operators first: if any size is symbolic, or with `NO_FUSION`.
- A product of a row in 8 bits, to which torch adds a second dimension for it, becomes one of vectors, and its scale
  keeps the dimension: what follows along the only axis runs along the first of two, ``y + y.flip(0)``.
- Matrices of at most 2 by 2, neither of them constant, are multiplied by a kernel that fuses the following operators
  and mixes up the numbers per column: ``relu(x @ y) * scale``.
- An absolute value of a concatenation is applied to its parts instead, for all users of the concatenation; and in one
  dimension it is dropped where OpenVINO assumes that nothing is below 0, for example for weights times a constant.
- For a convolution of single pixels (a kernel of 1) with strides, the input is sliced to every other pixel before the
  elementwise operators in front of it. That is wrong if the convolution pads: ``conv(relu(x))`` with padding 1.
- The mean of 2 or 3 channels over the batch and two more dimensions, of a value that OpenVINO keeps in blocks of
  channels (what pooling returns), mixes what its memory held before into the result from the second inference on:
  batch normalization in training mode after pooling.
- A matrix product that is reshaped to a scalar, directly or further on, crashes the process while it compiles:
  ``(x @ w).view(())``, and the gradient of a scalar input. Squeezing it to a scalar does not.

tests/contract/test_openvino_memory.py and test_openvino.py show each.
"""

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from torchserve_openvino.passes.ov.fused_chains import ELEMENTWISE, by_constant, is_constant
from torchserve_openvino.passes.ov.rewiring import kept_apart, put_behind
from torchserve_openvino.passes.pass_context import PassContext

_PRODUCTS = frozenset({"MatMul", "ScaledDotProductAttention"})
_ENDS = _PRODUCTS | {"Softmax"}
# Rank of the inputs whose reductions OpenVINO fuses wrongly.
_RANK = 3
# Largest number of rows and columns of the matrices whose products it fuses wrongly.
_TINY = 2
# Numbers of channels that it averages wrongly, and the fewest dimensions of their values.
_FEW_CHANNELS = (2, 3)
_IMAGE_RANK = 4
CONVOLUTIONS = frozenset({"Convolution", "ConvolutionBackpropData", "GroupConvolution", "GroupConvolutionBackpropData"})
# Whose kernels scale their result.
_SCALED = CONVOLUTIONS | {"MatMul"}
# What the plugin fuses as elementwise operators, including those with a number per channel.
JOINS = ELEMENTWISE | {"BatchNormInference"}
MOVES = frozenset({"Broadcast", "Convert", "ConvertLike", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def before_moves(value: ov.Output) -> ov.Output:
    """Returns what a value was before operators moved it only."""
    while value.get_node().get_type_name() in MOVES:
        value = value.get_node().input_value(0)
    return value


def keep_kernels_apart(model: ov.Model, _: PassContext) -> None:
    """Inserts an operator wherever OpenVINO would fuse two kernels wrongly; changes the model in place.

    A reshape to a scalar becomes a squeeze.
    """
    values: list[ov.Output] = []
    # Without a FakeQuantize, OpenVINO moves no scales.
    has_bytes = any(node.get_type_name() == "FakeQuantize" for node in model.get_ops())
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Reshape" and node.get_output_partial_shape(0) == ov.PartialShape([]):
            _squeeze(node)
        if has_bytes and (_reduces_bytes(node) or _clamps_bytes(node) or _pads_mean(node)):
            node.input(0).replace_source_output(kept_apart(node.input_value(0)).output(0))
        if has_bytes and (shared := _shared_result(node)) is not None:
            put_behind(shared, kept_apart)
        if has_bytes and _is_product_of_row(node):
            put_behind(node.output(0), kept_apart)
        if _is_joined_reduction(node) or _is_joined_product(node):
            put_behind(node.output(0), kept_apart)
        if node.get_type_name() in _PRODUCTS and is_attention(node):
            last = _last_of_kernel(node.output(0))
            values += [last] if last is not None else []
        elif node.get_type_name() == "GroupNormalization" and _has_a_joining_user(node.output(0)):
            values.append(node.output(0))
        elif (
            _pads_and_strides(node)
            or _is_mean_per_channel(node)
            or (
                node.get_type_name() == "Abs"
                and (_is_row(node.input_value(0)) or _is_concatenation(node.input_value(0)))
            )
        ):
            node.input(0).replace_source_output(rolled_by_nothing(node.input_value(0)).output(0))
    for value in values:
        put_behind(value, rolled_by_nothing)
    if values:
        model.validate_nodes_and_infer_types()


def _squeeze(reshape: ov.Node) -> None:
    """Replaces a reshape to a scalar with a squeeze of all dimensions."""
    value = reshape.input_value(0)
    rank = value.get_partial_shape().rank
    if rank.is_static and rank.get_length():
        put_behind(reshape.output(0), lambda _: ops.squeeze(value, ops.constant(np.arange(rank.get_length()))))


def rolled_by_nothing(value: ov.Output) -> ov.Node:
    """Rolls a value by 0: a no-op that OpenVINO does not recognize as one, and so does not remove."""
    zero = ops.constant(np.zeros(1, np.int64))
    return ops.roll(value, zero, zero)


def _pads_and_strides(node: ov.Node) -> bool:
    """Checks whether a node is a convolution of single pixels with padding and strides."""
    if node.get_type_name() not in {"Convolution", "GroupConvolution"}:
        return False
    attributes = node.get_attributes()
    kernel = node.input_value(1).get_partial_shape()
    spatial = [kernel[i] for i in range(len(kernel) - len(attributes["strides"]), len(kernel))]
    pixels = all(size.is_static and size.get_length() == 1 for size in spatial)
    return pixels and max(attributes["strides"]) > 1 and max(*attributes["pads_begin"], *attributes["pads_end"]) > 0


def _is_mean_per_channel(node: ov.Node) -> bool:
    """Checks whether a node may average few channels of images over the batch, but not over the channels."""
    if node.get_type_name() != "ReduceMean":
        return False
    shape, axes = node.input_value(0).get_partial_shape(), node.input_value(1).get_node()
    if shape.rank.is_dynamic or shape.rank.get_length() < _IMAGE_RANK:
        return False
    if axes.get_type_name() == "Constant":
        reduced = {int(axis) % shape.rank.get_length() for axis in np.ravel(axes.data)}
        if 0 not in reduced or 1 in reduced:
            return False
    return any(shape[1].compatible(ov.Dimension(channels)) for channels in _FEW_CHANNELS)


def is_dequantized(node: ov.Node) -> bool:
    """Checks whether a node makes floats of 8-bit integers."""
    return node.get_type_name() == "Convert" and node.input_value(0).get_element_type() in {ov.Type.u8, ov.Type.i8}


def _reduces_bytes(node: ov.Node) -> bool:
    """Checks whether a node is a reduction of floats to which OpenVINO might move a scale from before it.

    Those of images, which are right, stay fast.
    """
    if node.get_type_name() not in {"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"}:
        return False
    value = node.input_value(0)
    rank = value.get_partial_shape().rank
    image = rank.is_static and rank.get_length() == _IMAGE_RANK
    return value.get_element_type().is_real() and not image


def _clamps_bytes(node: ov.Node) -> bool:
    """Checks whether a node clamps dequantized values, and not what a product or a convolution made of them."""
    return node.get_type_name() in {"Clamp", "Minimum", "Maximum"} and _comes_from_bytes(node.input_value(0))


def _comes_from_bytes(value: ov.Output) -> bool:
    """Checks whether a value is dequantized, and perhaps moved."""
    while value.get_node().get_type_name() in MOVES | {"Multiply", "Subtract", "Slice", "StridedSlice", "Gather"}:
        if is_dequantized(value.get_node()):
            return True
        value = value.get_node().input_value(0)
    return False


def _pads_mean(node: ov.Node) -> bool:
    """Checks whether a node is a mean over windows that counts padding."""
    if node.get_type_name() != "AvgPool":
        return False
    attributes = node.get_attributes()
    return not attributes["exclude-pad"] and max(*attributes["pads_begin"], *attributes["pads_end"]) > 0


def _shared_result(node: ov.Node) -> ov.Output | None:
    """Returns what several operators use of a kernel in 8 bits, possibly times constants; None if there is nothing."""
    if node.get_type_name() not in _SCALED or not _comes_from_bytes(node.input_value(1)):
        return None
    value = node.output(0)
    while len(users := _users(value)) == 1:
        user = users[0].get_node()
        others = [other.get_node() for at, other in enumerate(user.input_values()) if at != users[0].get_index()]
        if user.get_type_name() not in MOVES | {"Multiply", "Divide"} or not all(map(is_constant, others)):
            return None
        value = user.output(0)
    return value


def _is_product_of_row(node: ov.Node) -> bool:
    """Checks whether a node is a product in 8 bits whose only row becomes a vector."""
    if node.get_type_name() != "MatMul" or not _comes_from_bytes(node.input_value(1)):
        return False
    users = [user.get_node() for user in _users(node.output(0))]
    return any(user.get_type_name() in {"Squeeze", "Reshape"} and _is_row(user.output(0)) for user in users)


def _users(value: ov.Output) -> list[ov.Input]:
    """Returns the inputs that take a value itself, and not only its shape."""
    return [port for port in value.get_target_inputs() if port.get_node().get_type_name() != "ShapeOf"]


def _is_joined_reduction(node: ov.Node) -> bool:
    """Checks whether a node is a reduction that OpenVINO would fuse wrongly with an operator after it."""
    if not node.get_type_name().startswith("Reduce"):
        return False
    value, rank = node.output(0), node.input_value(0).get_partial_shape().rank
    three = rank.is_static and rank.get_length() == _RANK
    if three and value.get_element_type().is_integral_number():
        return any(port.get_node().get_type_name() != "Result" for port in value.get_target_inputs())
    return _meets_numbers(value, only_divisors=not three)


def _is_joined_product(node: ov.Node) -> bool:
    """Checks whether a node may be a product of tiny matrices that OpenVINO would fuse with an operator after it."""
    if node.get_type_name() != "MatMul":
        return False
    shapes = [value.get_partial_shape() for value in node.input_values()]
    tiny = all(shape.rank.is_dynamic or max(list(shape.get_min_shape())[-2:]) <= _TINY for shape in shapes)
    return tiny and not by_constant(node) and _meets_numbers(node.output(0))


def _meets_numbers(value: ov.Output, only_divisors: bool = False) -> bool:
    """Checks whether elementwise operators after a value divide by a constant, or take one of several numbers."""
    for port in value.get_target_inputs():
        user = port.get_node()
        kind = user.get_type_name()
        if kind in JOINS:
            others = [other for at, other in enumerate(user.input_values()) if at != port.get_index()]
            if not all(is_constant(other.get_node()) for other in others):
                continue
            several = any(set(other.get_partial_shape().get_min_shape()) - {1} for other in others)
            if kind == "Divide" or (several and not only_divisors):
                return True
        if kind in JOINS | MOVES and _meets_numbers(user.output(0), only_divisors):
            return True
    return False


def _is_row(value: ov.Output) -> bool:
    """Checks whether a value may be a 1-d float tensor; integers can only be shapes, which must stay visible."""
    if not value.get_element_type().is_real():
        return False
    rank = value.get_partial_shape().rank
    return rank.is_dynamic or rank.get_length() == 1


def _is_concatenation(value: ov.Output) -> bool:
    return bool(before_moves(value).get_node().get_type_name() == "Concat")


def is_attention(product: ov.Node) -> bool:
    """Checks whether a product is attention: a softmax reaches it without another product in between."""
    seen: set[str] = set()
    waiting = [product]
    while waiting:
        for port in waiting.pop().inputs():
            node = port.get_source_output().get_node()
            kind = node.get_type_name()
            if kind == "Softmax":
                return True
            if kind not in _ENDS and node.get_name() not in seen:
                seen.add(node.get_name())
                waiting.append(node)
    return product.get_type_name() == "ScaledDotProductAttention"


def _last_of_kernel(value: ov.Output) -> ov.Output | None:
    """Returns the last value that OpenVINO may compute in the kernel of attention; None if there is no limit.

    That is one with several users, or one that an elementwise operator makes larger by broadcasting.
    """
    while len(users := list(value.get_target_inputs())) == 1:
        node = users[0].get_node()
        kind = node.get_type_name()
        grows = node.get_output_partial_shape(0) != value.get_partial_shape()
        if grows and kind in JOINS:
            return value
        if kind in {"Result", *_ENDS} or (grows and kind not in MOVES):
            return None
        value = node.output(0)
    rank = value.get_partial_shape().rank
    return value if rank.is_static and rank.get_length() else None


def _has_a_joining_user(value: ov.Output) -> bool:
    """Checks whether an operator takes a value, perhaps moved, together with another value that is not a constant."""
    for user in value.get_target_inputs():
        node = user.get_node()
        kind = node.get_type_name()
        if kind in MOVES and _has_a_joining_user(node.output(0)):
            return True
        others = [port.get_source_output().get_node().get_type_name() for port in node.inputs()]
        if kind not in MOVES and len([other for other in others if other != "Constant"]) > 1:
            return True
    return False
