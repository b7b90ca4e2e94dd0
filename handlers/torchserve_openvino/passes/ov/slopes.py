"""Makes one operator of ``where(x > 0, x, slope * x)``, as which PyTorch decomposes a PReLU (OpenVINO 2026.4).

The CPU plugin runs a PRelu in the kernel of the convolution before it, but three operators in one of their own. A PRelu
leaves zero as it is where PyTorch multiplies it with the slope: its sign differs for negative slopes, and all of it for
infinite ones.
"""

from functools import partial

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from torchserve_openvino.ops.openvino_values import int64
from torchserve_openvino.passes.ov.constant_parts import constant_value
from torchserve_openvino.passes.ov.rewiring import put_behind
from torchserve_openvino.passes.ov.zero_signs import shows_sign_of_zero
from torchserve_openvino.passes.pass_context import PassContext

_ABOVE, _BELOW = frozenset({"Greater", "GreaterEqual"}), frozenset({"Less", "LessEqual"})


def join_slopes(model: ov.Model, _: PassContext) -> None:
    """Replaces such selections with PRelu, in place."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Select" and (rectified := _rectified(node)) is not None:
            value, factor = rectified
            slopes = ops.reshape(factor, int64([-1]), special_zero=False)
            put_behind(node.output(0), partial(_with_slopes, value, slopes))


def _with_slopes(value: ov.Output, slopes: ov.Node, _: ov.Output) -> ov.Node:
    return ops.prelu(value, slopes)


def _rectified(node: ov.Node) -> tuple[ov.Output, ov.Output] | None:
    """Returns the value that a selection rectifies, and its slopes along the second dimension; None if it does not."""
    compared = _compared_with_zero(node.input_value(0).get_node())
    # Behind a convolution in 16 bits the plugin does not compile it.
    if compared is None or node.get_element_type() != ov.Type.f32:
        return None
    value, is_above = compared
    positive, product = node.input_value(1 if is_above else 2), node.input_value(2 if is_above else 1).get_node()
    if (
        positive != value
        or product.get_type_name() != "Multiply"
        or value.get_partial_shape() != node.get_output_partial_shape(0)
    ):
        return None
    factors = [operand for operand in product.input_values() if operand != value]
    slopes = constant_value(factors[0]) if len(factors) == 1 else None
    if slopes is None or not _is_along_channels(slopes, value.get_partial_shape()) or not np.isfinite(slopes).all():
        return None
    return None if np.signbit(slopes).any() and shows_sign_of_zero(node.output(0)) else (value, factors[0])


def _compared_with_zero(node: ov.Node) -> tuple[ov.Output, bool] | None:
    """Returns a value that is compared with zero, and whether the comparison holds above it; None for anything else."""
    while node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    kind = node.get_type_name()
    if kind not in _ABOVE | _BELOW:
        return None
    for position in (0, 1):
        number = constant_value(node.input_value(1 - position))
        if number is not None and number.size == 1 and not number.any():
            return node.input_value(position), (kind in _ABOVE) == (position == 0)
    return None


def _is_along_channels(slopes: np.ndarray, shape: ov.PartialShape) -> bool:
    """Returns True if there is one slope, or one for each channel."""
    if shape.rank.is_dynamic or slopes.ndim > len(shape):
        return False
    sizes = [1] * (len(shape) - slopes.ndim) + list(slopes.shape)
    return all(size == 1 for position, size in enumerate(sizes) if position != 1) and (
        slopes.size == 1 or shape[1] == slopes.size
    )
