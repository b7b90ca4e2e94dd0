"""Separates weights that one graph uses in two orientations.

OpenVINO's CPU plugin packs the weights of a matrix multiplication or convolution into a layout of its own, and caches
the packed weights by the address of the original and the wanted layout. The orientation of the original is not part of
that key: if a square matrix is used both as it is and transposed (tied weights, a basis and back), both uses get the
same packed weights, and one of them computes nonsense. A stored model keeps equal constants only once, which has the
same effect. tests/contract/test_openvino.py shows it. Here each orientation gets its own constant, stored as it is
packed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from torchserve_openvino.passes.pass_context import Compile, PassContext

# Type -> the two dimensions that its orientations swap, and whether the operator takes its weights with them swapped.
_CONVOLUTIONS = {
    "Convolution": ((0, 1), False),
    "ConvolutionBackpropData": ((0, 1), True),
    "GroupConvolution": ((1, 2), False),
    "GroupConvolutionBackpropData": ((1, 2), True),
}
# Operators that may stand between a constant and its use, and can be folded.
_FOLDED = frozenset({"Convert", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_SAMPLE_BYTES = 512


@dataclass
class _Use:
    """One operator and its weights.

    Attributes:
        node: The operator; its second input is the weights.
        axes: The dimensions that ``turned`` swaps.
        turned: Whether the operator takes its weights with these swapped.
        constant: The constant that the weights are computed from.
        path: The operators between the constant and the weights, as text: equal for equal weights.
    """

    node: ov.Node
    axes: tuple[int, int]
    turned: bool
    constant: ov.Node
    path: tuple[str, ...]

    @property
    def packed(self) -> tuple[object, ...]:
        """What OpenVINO distinguishes packed weights by, apart from the address."""
        shape = list(self.node.input_value(1).get_shape())
        if self.turned:
            a, b = self.axes
            shape[a], shape[b] = shape[b], shape[a]
        return tuple(shape)

    @property
    def orientation(self) -> tuple[object, ...]:
        """The orientation of the constant in the packed weights."""
        swap = f"Transpose {_swapped(len(self.node.input_value(1).get_shape()), self.axes)}"
        steps = [*self.path, swap] if self.turned else list(self.path)
        return tuple(steps[:-2] if steps[-2:] == [swap, swap] else steps)


def keep_orientations_apart(model: ov.Model, context: PassContext) -> None:
    """Gives weights that a graph uses in several orientations one constant per orientation.

    Args:
        model: Changed in place.
        context: Has what compiles a part of it.
    """
    groups: dict[tuple[object, ...], list[_Use]] = {}
    for use in _uses(model):
        groups.setdefault(use.packed, []).append(use)
    changed = [_part(uses, context.compile) for uses in groups.values() if len({use.orientation for use in uses}) > 1]
    if any(changed):
        model.validate_nodes_and_infer_types()
        # A new constant may equal another one.
        keep_orientations_apart(model, context)


def _uses(model: ov.Model) -> Iterator[_Use]:
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind == "MatMul":
            axes, turned = (-2, -1), not node.get_attributes()["transpose_b"]
        elif kind in _CONVOLUTIONS:
            axes, turned = _CONVOLUTIONS[kind]
        else:
            continue
        path: list[str] = []
        source = node.input_value(1).get_node()
        if len(node.input_value(1).get_partial_shape()) < 2 or node.input_value(1).get_partial_shape().is_dynamic:
            continue
        while source.get_type_name() in _FOLDED:
            path.append(f"{source.get_type_name()} {_argument(source)}")
            source = source.input_value(0).get_node()
        if source.get_type_name() == "Constant":
            yield _Use(node, axes, turned, source, tuple(reversed(path)))


def _argument(node: ov.Node) -> object:
    if node.get_type_name() == "Convert":
        return node.get_element_type()
    if node.get_type_name() in {"Reshape", "Squeeze", "Unsqueeze"}:
        return tuple(node.get_output_partial_shape(0).get_min_shape())
    order = node.input_value(1).get_node()
    return tuple(int(axis) for axis in order.data) if order.get_type_name() == "Constant" else order.get_name()


def _part(uses: list[_Use], compile: Compile) -> bool:
    """Gives each use that reorients a constant its own one, if equal constants are used in several orientations."""
    alike: dict[bytes, list[list[_Use]]] = {}
    for use in uses:
        groups = alike.setdefault(_sample(use.constant), [])
        group = next((group for group in groups if _equal(group[0].constant, use.constant)), None)
        if group is None:
            groups.append([use])
        else:
            group.append(use)
    packed: dict[tuple[object, ...], ov.Output] = {}
    for group in (group for groups in alike.values() for group in groups):
        if len({use.orientation for use in group}) > 1:
            for use in group:
                if key := use.orientation:
                    key = (id(group), key, use.turned)
                    packed[key] = packed.get(key) or _as_packed(use, compile)
                    use.node.input(1).replace_source_output(packed[key])
    return bool(packed)


def _as_packed(use: _Use, compile: Compile) -> ov.Output:
    """Builds the use's weights from a constant stored as they are packed; a plain copy would be merged when stored."""
    source = use.node.input_value(1)
    kind = source.get_element_type()
    value = _value(source, compile)
    order = _swapped(value.ndim, use.axes)
    stored = ops.constant(np.ascontiguousarray(value.transpose(order) if use.turned else value))
    weights = stored if stored.get_element_type() == kind else ops.convert(stored, kind)
    return (ops.transpose(weights, ops.constant(np.array(order, dtype=np.int64))) if use.turned else weights).output(0)


def _swapped(rank: int, axes: tuple[int, int]) -> tuple[int, ...]:
    order = list(range(rank))
    a, b = axes
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def _value(source: ov.Output, compile: Compile) -> "np.ndarray[Any, Any]":
    """Computes a value that depends on constants only; floats as float32, since NumPy has no bfloat16."""
    if source.get_element_type().is_real():
        source = ops.convert(source, ov.Type.f32).output(0)
    compiled = compile(ov.Model([ops.result(source)], []), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return np.array(compiled([])[0])


def _flat(constant: ov.Node) -> "np.ndarray[Any, Any]":
    return np.ascontiguousarray(constant.data).reshape(-1).view(np.uint8)


def _sample(constant: ov.Node) -> bytes:
    content = _flat(constant)
    return bytes(content[:_SAMPLE_BYTES]) + bytes(content[-_SAMPLE_BYTES:]) + str(content.size).encode()


def _equal(a: ov.Node, b: ov.Node) -> bool:
    one, other = _flat(a), _flat(b)
    return one.ctypes.data == other.ctypes.data or np.array_equal(one, other)
