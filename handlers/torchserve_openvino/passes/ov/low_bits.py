"""Makes 4-bit constants of weights that have few enough values, which OpenVINO multiplies without unpacking them.

Such a weight is a chain of Convert, Subtract, Multiply and operators that only rearrange, from a constant of 8-bit
integers to a matrix product. The chain that takes its place (`quantized/pack_linears.py`) has the same values in
float32, bit by bit; a weight for which there is none stays as it is. What a model computes in float16, OpenVINO
computes in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from torchserve_openvino.ops.openvino_values import array_of
from torchserve_openvino.passes.pass_context import PassContext
from torchserve_openvino.quantized.layer import QuantizedLinear
from torchserve_openvino.quantized.pack_linears import ordered, product

_BYTES = {ov.Type.u8, ov.Type.i8}
_NUMBERS = {ov.Type.f32, ov.Type.f16, ov.Type.i32, ov.Type.i64}
# A smaller weight is not worth it.
_LEAST = 1024
_FEW = 16


@dataclass(frozen=True)
class _Affine:
    """``(values - zeros) * scales``, all of one shape, where ``scales`` were multiplied in order."""

    values: NDArray[np.int64]
    zeros: NDArray[np.int64]
    scales: tuple[NDArray[np.float32], ...]

    def moved(self, move: Callable[[NDArray[Any]], NDArray[Any]]) -> "_Affine":
        return _Affine(move(self.values), move(self.zeros), tuple(map(move, self.scales)))

    def computed(self) -> NDArray[np.float32]:
        values = (self.values - self.zeros).astype(np.float32)
        for scale in self.scales:
            values = values * scale
        return values


def pack_weights(model: ov.Model, _: PassContext) -> None:
    """Replaces weights of matrix products in place."""
    changed = False
    for operation in model.get_ordered_ops():
        if operation.get_type_name() != "MatMul" or operation.get_attributes()["transpose_a"]:
            continue
        source = operation.input(0).get_source_output()
        layer = _layer(operation)
        if layer is None or source.get_element_type() != ov.Type.f32:
            continue
        blocked = layer.blocked()
        packed = product(ordered(source, blocked.order), blocked, f"{operation.get_friendly_name()}/weight")
        packed.set_friendly_name(operation.get_friendly_name())
        packed.output(0).get_tensor().set_names(operation.output(0).get_names())
        for user in operation.output(0).get_target_inputs():
            user.replace_source_output(packed.output(0))
        changed = True
    if changed:
        model.validate_nodes_and_infer_types()


def _layer(operation: Any) -> QuantizedLinear | None:
    weight = operation.input(1).get_source_output()
    shape = weight.get_partial_shape()
    if weight.get_element_type() != ov.Type.f32 or shape.is_dynamic or len(shape) != 2:
        return None
    affine = _affine(weight.get_node())
    if affine is None or affine.values.size < _LEAST or affine.values.max() - affine.values.min() >= _FEW:
        return None
    if not operation.get_attributes()["transpose_b"]:
        affine = affine.moved(np.transpose)
    least = affine.values.min()
    zeros = affine.zeros - least
    if zeros.min() < 0 or zeros.max() >= _FEW or not affine.scales:
        return None
    scales = affine.scales[0]
    for scale in affine.scales[1:]:
        scales = scales * scale
    # Columns with the same zero points and scales belong together.
    differs = (np.diff(zeros, axis=1) != 0).any(0) | (np.diff(scales, axis=1) != 0).any(0)
    groups = np.concatenate([[0], np.cumsum(differs)])
    first = np.concatenate([[0], 1 + np.flatnonzero(differs)])
    layer = QuantizedLinear(
        4, (affine.values - least).astype(np.uint8), zeros[:, first].astype(np.uint8), scales[:, first], groups
    )
    return layer if np.array_equal(layer.dequantized(), affine.computed()) else None


def _affine(node: Any) -> _Affine | None:
    """Follows a chain back to its constant; returns None if it is not such a chain."""
    kind = node.get_type_name()
    if kind == "Constant":
        return _constant(node)
    if kind == "Convert":
        affine = _affine(node.input_value(0).get_node())
        return affine if affine is not None and _keeps(affine, node.get_output_element_type(0)) else None
    if kind in {"Subtract", "Multiply"}:
        return _computed(kind, *(value.get_node() for value in node.input_values()))
    move = _MOVES.get(kind)
    source = _affine(node.input_value(0).get_node()) if move is not None else None
    if move is None or source is None or node.get_output_partial_shape(0).is_dynamic:
        return None
    return source.moved(lambda array: move(array, node))


def _keeps(affine: _Affine, kind: ov.Type) -> bool:
    """Returns True if a conversion changes no value: to an integer type, fractions and large numbers change."""
    if kind.is_real():
        return True
    if affine.scales or not kind.is_integral_number():
        return False
    values, limits = affine.values - affine.zeros, np.iinfo(kind.to_dtype())
    return bool(limits.min <= values.min() and values.max() <= limits.max)


def _constant(node: Any) -> _Affine | None:
    if node.get_element_type() not in _BYTES:
        return None
    values = np.asarray(node.data).astype(np.int64)
    return _Affine(values, np.zeros_like(values), ())


def _computed(kind: str, left: Any, right: Any) -> _Affine | None:
    affine, other = _affine(left), _number(right)
    if kind == "Multiply" and affine is None:
        affine, other = _affine(right), _number(left)
    if affine is None or other is None or np.broadcast_shapes(affine.values.shape, other.shape) != affine.values.shape:
        return None
    other = np.broadcast_to(other, affine.values.shape)
    if kind == "Multiply":
        return _Affine(affine.values, affine.zeros, (*affine.scales, other.astype(np.float32)))
    whole = np.rint(other)
    if affine.scales or not np.array_equal(whole, other):
        return None
    return _Affine(affine.values, affine.zeros + whole.astype(np.int64), ())


def _number(node: Any) -> NDArray[Any] | None:
    """Returns the value of a constant, or of a short chain from one."""
    kind = node.get_type_name()
    if kind == "Constant":
        return array_of(node)
    if kind == "Convert" and node.get_output_element_type(0) in _NUMBERS:
        number = _number(node.input_value(0).get_node())
        return None if number is None else number.astype(node.get_output_element_type(0).to_dtype())
    move = _MOVES.get(kind)
    number = _number(node.input_value(0).get_node()) if move is not None else None
    return None if move is None or number is None else move(number, node)


def _reshaped(array: NDArray[Any], node: Any) -> NDArray[Any]:
    return array.reshape(list(node.get_output_shape(0)))


def _transposed(array: NDArray[Any], node: Any) -> NDArray[Any]:
    order = np.asarray(node.input_value(1).get_node().data)
    return array.transpose(order if order.size else None)


_MOVES: dict[str, Callable[[NDArray[Any], Any], NDArray[Any]]] = {
    "Reshape": _reshaped, "Squeeze": _reshaped, "Unsqueeze": _reshaped, "Transpose": _transposed,
}  # fmt: skip
