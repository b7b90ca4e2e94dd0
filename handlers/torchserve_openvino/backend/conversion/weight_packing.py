"""Weights that one graph uses in two orientations, kept apart.

OpenVINO's CPU plugin packs the weights of a matrix multiplication or convolution into a layout of its own, and looks
packed ones up by the address of the original and the layout wanted. How the original lies is not part of that key: of a
square matrix that is used as it is and transposed (tied weights, a basis and back) both uses get the same packed
weights, and one of them computes nonsense. A stored model keeps equal constants once, which has the same effect.
tests/contract/test_openvino.py shows it. Here each orientation gets a constant of its own, stored as it is packed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from torchserve_openvino.backend.upstream._openvino_private import core

# Type -> the two dimensions that a use exchanges, and whether this operator takes its weights with them exchanged.
_CONVOLUTIONS = {
    "Convolution": ((0, 1), False),
    "ConvolutionBackpropData": ((0, 1), True),
    "GroupConvolution": ((1, 2), False),
    "GroupConvolutionBackpropData": ((1, 2), True),
}
# What may stand between a constant and its use, and can be computed before.
_FOLDED = frozenset({"Convert", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_SAMPLE_BYTES = 512


@dataclass
class _Use:
    """One operator and its weights.

    Attributes:
        node: The operator; its second input are the weights.
        axes: The dimensions that ``turned`` exchanges.
        turned: Whether the operator takes them exchanged.
        path: What is computed of the constant before, as text: equal for equal weights.
    """

    node: ov.Node
    axes: tuple[int, int]
    turned: bool
    constant: ov.Node
    path: tuple[str, ...]

    @property
    def packed(self) -> tuple[object, ...]:
        """What OpenVINO tells packed weights apart by, but for the address."""
        shape = list(self.node.input_value(1).get_shape())
        if self.turned:
            a, b = self.axes
            shape[a], shape[b] = shape[b], shape[a]
        return tuple(shape)

    @property
    def orientation(self) -> tuple[object, ...]:
        """How the constant lies in what is packed."""
        swap = f"Transpose {_swapped(len(self.node.input_value(1).get_shape()), self.axes)}"
        steps = [*self.path, swap] if self.turned else list(self.path)
        return tuple(steps[:-2] if steps[-2:] == [swap, swap] else steps)


def keep_orientations_apart(model: ov.Model) -> None:
    """Gives weights that a graph uses in several orientations a constant for each.

    Args:
        model: Changed in place.
    """
    groups: dict[tuple[object, ...], list[_Use]] = {}
    for use in _uses(model):
        groups.setdefault(use.packed, []).append(use)
    changed = [_part(uses) for uses in groups.values() if len({use.orientation for use in uses}) > 1]
    if any(changed):
        model.validate_nodes_and_infer_types()
        # What was made may equal another constant.
        keep_orientations_apart(model)


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


def _part(uses: list[_Use]) -> bool:
    """Of each content that is used in several orientations, gives the uses that turn it what they need as it is."""
    alike: dict[bytes, list[list[_Use]]] = {}
    for use in uses:
        groups = alike.setdefault(_sample(use.constant), [])
        group = next((each for each in groups if _equal(each[0].constant, use.constant)), None)
        if group is None:
            groups.append([use])
        else:
            group.append(use)
    made: dict[tuple[object, ...], ov.Output] = {}
    for group in (each for groups in alike.values() for each in groups):
        if len({use.orientation for use in group}) > 1:
            for use in group:
                if key := use.orientation:
                    key = (id(group), key, use.turned)
                    made[key] = made.get(key) or _as_packed(use)
                    use.node.input(1).replace_source_output(made[key])
    return bool(made)


def _as_packed(use: _Use) -> ov.Output:
    """The use's weights from a constant that lies as they are packed. A mere copy would be stored as the original."""
    source = use.node.input_value(1)
    kind = source.get_element_type()
    value = _value(source)
    order = _swapped(value.ndim, use.axes)
    stored = ops.constant(np.ascontiguousarray(value.transpose(order) if use.turned else value))
    weights = stored if stored.get_element_type() == kind else ops.convert(stored, kind)
    return (ops.transpose(weights, ops.constant(np.array(order, dtype=np.int64))) if use.turned else weights).output(0)


def _swapped(rank: int, axes: tuple[int, int]) -> tuple[int, ...]:
    order = list(range(rank))
    a, b = axes
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def _value(source: ov.Output) -> "np.ndarray[Any, Any]":
    """What a chain of a constant computes; floats as float32, since NumPy has no bfloat16."""
    if source.get_element_type().is_real():
        source = ops.convert(source, ov.Type.f32).output(0)
    compiled = core().compile_model(ov.Model([ops.result(source)], []), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return np.array(compiled([])[0])


def _flat(constant: ov.Node) -> "np.ndarray[Any, Any]":
    return np.ascontiguousarray(constant.data).reshape(-1).view(np.uint8)


def _sample(constant: ov.Node) -> bytes:
    content = _flat(constant)
    return bytes(content[:_SAMPLE_BYTES]) + bytes(content[-_SAMPLE_BYTES:]) + str(content.size).encode()


def _equal(a: ov.Node, b: ov.Node) -> bool:
    one, other = _flat(a), _flat(b)
    return one.ctypes.data == other.ctypes.data or np.array_equal(one, other)
