"""Computes products with weights as three products of bfloat16, summed in float32: the precision ``bf16x3``.

A float32 is nearly the sum of two bfloat16: its rounded value and the rounded rest, 16 bits of mantissa together. So
``x w = x_high w_high + x_high w_low + x_low w_high``; ``x_low w_low`` is left out, which is below 2^-16 of the product
(G. Henry, P. Tang, A. Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
computations", 2019; ``FLOAT_TO_BF16X3`` of BLAS libraries). AMX multiplies bfloat16 some five times as fast as AVX-512
multiplies float32, so that three products are faster than one. Everything else stays in float32.

For a matrix product, ``x_high`` and ``x_low`` are the halves of one value of twice the batch: the kernel that computes
``x`` writes them there, and ``w_high`` is read once for both. The plugin adds up convolutions in place, so there they
stay apart.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import openvino as ov
import torch
from openvino import opset15 as ops

from torchserve_openvino.backend.upstream._openvino_private import fuse_normalization, product_in_f32
from torchserve_openvino.config.openvino.precisions import BF16X3
from torchserve_openvino.config.openvino.properties import PRECISION
from torchserve_openvino.ops.openvino_values import array_of
from torchserve_openvino.passes.ov.constant_parts import constant_value
from torchserve_openvino.passes.pass_context import PassContext
from torchserve_openvino.report.records import BF16X3_SUFFIX

# What splitting a value of an operand and adding to a value of the result cost, in multiplications by weights that
# the three products save. Measured on a Xeon with AMX, as float32's time by bf16x3's: matrix products with 256 x 256
# weights 1.0, 384 x 384 1.5, 384 x 96 0.9, 768 x 768 1.8; convolutions 3 x 3 of 128 and 256 channels 1.9, of 64 1.1.
# Those of 1 x 1 are between 0.8 and 1.4, and mostly stay in float32.
_COSTS = {"MatMul": (140.0, 140.0), "Convolution": (500.0, 250.0)}
# With fewer rows, reading the weights takes longer than multiplying.
_ROWS = 24
# The largest bfloat16.
_LARGEST = 255.0 * 2.0**120
_BETWEEN = frozenset({"Convert", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_LOW_BITS = frozenset({ov.Type.u8, ov.Type.i8, ov.Type.u4, ov.Type.i4, ov.Type.u2, ov.Type.nf4})


@dataclass
class ProductShare:
    """How much of the products of a model is computed in bf16x3.

    Attributes:
        products: Number of products with weights.
        split: How many of them are in bf16x3.
        operations: Multiplications of all of them, for the model's shapes; a size that is open counts as 1.
        split_operations: Multiplications of those in bf16x3.
    """

    products: int = 0
    split: int = 0
    operations: int = 0
    split_operations: int = 0

    def to_dict(self) -> dict[str, int]:
        """Returns the counts, JSON-safe, by the names in a `PartitionRecord`."""
        return {
            "products": self.products,
            "bf16x3": self.split,
            "multiplications": self.operations,
            "multiplications_bf16x3": self.split_operations,
        }


@dataclass
class _Product:
    """A product of a computed value and weights.

    Attributes:
        inner: How many multiplications one value of the result takes.
        columns: Values of the result for each row, or channels.
        rows: Rows, or pixels; None if a size is open.
        ratio: Values of the operand for each row.
    """

    node: ov.Node
    inner: int
    columns: int
    rows: int | None
    ratio: float

    @property
    def operations(self) -> int:
        return (self.rows or 1) * self.inner * self.columns


class _Operand:
    """A value that is split for the products that it is an operand of.

    Attributes:
        high: The value, rounded to bfloat16.
        low: The rest, rounded.
    """

    def __init__(self, value: ov.Output) -> None:
        # What would become infinite remains in the rest: infinity times a weight and its own rest may be NaN.
        high = ops.convert(ops.clamp(value, -_LARGEST, _LARGEST), ov.Type.bf16)
        rest = ops.subtract(value, ops.convert(high, ov.Type.f32))
        self.high, self.low = high.output(0), ops.convert(rest, ov.Type.bf16).output(0)

    @functools.cached_property
    def both(self) -> ov.Output:
        """High and low, one after the other along the batch."""
        return ops.concat([self.high, self.low], 0).output(0)

    @functools.cached_property
    def first_half(self) -> ov.Output:
        """High once more, as a part of `both`: a kernel writes a value again for each of its users."""
        return ops.split(self.both, ops.constant(np.int64(0)), 2).output(0)


@dataclass
class _Splits:
    """Split operands and weights, which their users share."""

    operands: dict[tuple[str, int], _Operand] = field(default_factory=dict)
    weights: dict[tuple[str, int, bool], tuple[ov.Output, ov.Output]] = field(default_factory=dict)

    def of(self, value: ov.Output) -> _Operand:
        """Returns the split of an operand."""
        if (key := _key(value)) not in self.operands:
            self.operands[key] = _Operand(value)
        return self.operands[key]


def in_bf16x3(context: PassContext) -> bool:
    """Returns True if a model is compiled in the precision bf16x3."""
    return context.config.get(PRECISION) == BF16X3


def multiply_in_bf16x3(model: ov.Model, context: PassContext) -> None:
    """Computes the products of a model in bf16x3 where that is faster, in place.

    Args:
        model: Its constants stay as they are.
        context: Gets `PassContext.products`, the share of these products.
    """
    if any(node.get_type_name() == "Convolution" for node in model.get_ops()) and not _has_low_bits(model):
        # Before the split: BatchNorm that scales the result would else not become part of the weights.
        fuse_normalization(model)
    products = list(_products(model))
    users: dict[tuple[str, int], int] = {}
    for product in products:
        key = _key(product.node.input_value(0))
        users[key] = users.get(key, 0) + 1
    share, splits = ProductShare(), _Splits()
    for product in products:
        share.products += 1
        share.operations += product.operations
        if _pays(product, users[_key(product.node.input_value(0))]) and _split(product, splits):
            share.split += 1
            share.split_operations += product.operations
    if share.split:
        model.validate_nodes_and_infer_types()
    context.products = share.to_dict()


def _has_low_bits(model: ov.Model) -> bool:
    """Checks for weights of few bits, which the plugin multiplies as they are if nothing folds their scales."""
    return any(
        node.get_type_name() == "Constant"
        and node.get_element_type() in _LOW_BITS
        and any(user.get_node().get_type_name() == "Convert" for user in node.output(0).get_target_inputs())
        for node in model.get_ops()
    )


def _products(model: ov.Model) -> Iterator[_Product]:
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind not in {"MatMul", "Convolution"} or node.get_output_element_type(0) != ov.Type.f32:
            continue
        shapes = [value.get_partial_shape() for value in (*node.input_values(), node.output(0))]
        if (
            any(shape.rank.is_dynamic for shape in shapes)
            or shapes[1].is_dynamic
            or not _is_weight(node.input_value(1))
        ):
            continue
        if _is_weight(node.input_value(0)) or len(shapes[0]) < 2:
            continue
        weights = list(shapes[1].to_shape())
        if kind == "MatMul":
            attributes = node.get_attributes()
            if attributes["transpose_a"] or len(weights) != 2:
                continue
            columns, inner = weights if attributes["transpose_b"] else reversed(weights)
            yield _Product(node, inner, columns, _size(list(shapes[2])[:-1]), inner)
        else:
            columns, channels = weights[:2]
            pixels, before = _size([shapes[2][0], *list(shapes[2])[2:]]), _size([shapes[0][0], *list(shapes[0])[2:]])
            ratio = before / pixels if before and pixels else 1.0
            yield _Product(node, math.prod(weights[1:]), columns, pixels, channels * ratio)


def _size(dimensions: list[ov.Dimension]) -> int | None:
    """Returns the product of sizes; None if one is open."""
    if any(dimension.is_dynamic for dimension in dimensions):
        return None
    return math.prod(dimension.get_length() for dimension in dimensions)


def _is_weight(value: ov.Output) -> bool:
    """Checks whether a value is a constant of floats, behind nothing but casts and other shapes of it."""
    node = value.get_node()
    while node.get_type_name() in _BETWEEN:
        node = node.input_value(0).get_node()
    return (
        node.get_type_name() == "Constant"
        and node.get_element_type().is_real()
        and node.get_element_type().bitwidth >= 16
    )


def _pays(product: _Product, users: int) -> bool:
    """Returns True if three products of bfloat16 are faster than one of float32.

    Args:
        product: The product.
        users: How many products share the split operand.
    """
    if product.rows is None:
        # With open sizes, the plugin splits the operand of a convolution by several kernels.
        if product.node.get_type_name() == "Convolution":
            return False
    elif product.rows < _ROWS:
        return False
    operand, result = _COSTS[product.node.get_type_name()]
    return product.inner * product.columns > operand * product.ratio / users + result * product.columns


def _split(product: _Product, splits: _Splits) -> bool:
    """Replaces a product; returns False if its weights have values that bfloat16 lacks."""
    node = product.node
    kind = node.get_type_name()
    weights = _split_weights(node, kind, splits)
    if weights is None:
        return False
    parts = _sum_of_products(node, kind, splits.of(node.input_value(0)), weights)
    result = parts[-1]
    name = node.get_friendly_name()
    for position, part in enumerate(parts):
        part.set_friendly_name(f"{name}/{position}{BF16X3_SUFFIX}")
    names = node.output(0).get_names()
    for user in list(node.output(0).get_target_inputs()):
        user.replace_source_output(result.output(0))
    if names:
        node.output(0).set_names(set())
        result.output(0).set_names(names)
    return True


def _sum_of_products(
    node: ov.Node, kind: str, operand: "_Operand", weights: tuple[ov.Output, ov.Output]
) -> list[ov.Node]:
    """Returns the products and sums of them, of which the last one is the result."""
    attributes = _attributes(node, kind)
    high, low = weights

    def times(value: ov.Output, weight: ov.Output) -> ov.Output:
        return product_in_f32(kind, value, weight, attributes)

    if kind == "Convolution":
        # The plugin adds the result of another convolution while it computes one, and needs no copy for that.
        products = [times(operand.high, low), times(operand.low, high), times(operand.high, high)]
        total = ops.add(products[1], products[0])
        return [*(product.get_node() for product in products), total, ops.add(products[2], total)]
    both, rest = times(operand.both, high), times(operand.first_half, low)
    halves = ops.split(both, ops.constant(np.int64(0)), 2)
    total = ops.add(halves.output(1), rest)
    return [both.get_node(), rest.get_node(), total, ops.add(total, halves.output(0))]


def _split_weights(node: ov.Node, kind: str, splits: _Splits) -> tuple[ov.Output, ov.Output] | None:
    value = node.input_value(1)
    # All in one orientation, by rows: the plugin keeps the packed weights of a constant for one only
    # (`weight_packing.py`), and makes a product that rounds of one with a transposed constant.
    turned = kind == "MatMul" and not node.get_attributes()["transpose_b"]
    key = (*_key(value), turned)
    if key not in splits.weights:
        source = value.get_node()
        numbers = array_of(source) if source.get_type_name() == "Constant" else constant_value(value)
        if numbers is None:
            return None
        exact = torch.from_numpy(np.array(numbers.T if turned else numbers, np.float32, order="C"))
        least, largest = map(float, exact.aminmax())
        # NaN fails both.
        if least >= -_LARGEST and largest <= _LARGEST:
            high = exact.bfloat16()
            low = (exact - high.float()).bfloat16()
            splits.weights[key] = _constant(high), _constant(low)
        else:
            return None
    return splits.weights[key]


def _constant(values: torch.Tensor) -> ov.Output:
    bits = ov.Tensor(values.view(torch.int16).numpy(), ov.Shape(list(values.shape)), ov.Type.bf16)
    return ov.op.Constant(bits, shared_memory=False).output(0)


def _attributes(node: ov.Node, kind: str) -> dict[str, str]:
    """Returns the attributes of an operation as an IR writes them."""
    own = node.get_attributes()
    if kind == "MatMul":
        return {"transpose_a": "false", "transpose_b": "true"}
    lists = {name: ",".join(map(str, own[name])) for name in ("strides", "dilations", "pads_begin", "pads_end")}
    return {**lists, "auto_pad": str(own["auto_pad"]).lower()}


def _key(value: ov.Output) -> tuple[str, int]:
    return value.get_node().get_name(), value.get_index()
