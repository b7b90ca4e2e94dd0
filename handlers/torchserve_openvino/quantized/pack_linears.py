"""Puts weights of few bits into an OpenVINO model, as constants that its CPU plugin multiplies without unpacking them.

A weight is a chain, which the plugin makes part of the matrix product:

    Constant u4 [out, blocks, size] -> Convert -> Subtract zero points -> Multiply scales -> Reshape [out, in]

It is in float32 from the Convert on, so that the product is the same where the plugin computes it beforehand.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import openvino as ov
from blake3 import blake3
from numpy.typing import NDArray
from openvino import opset13 as ops

from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.quantized.layer import Blocked, Integers, QuantizedLinear, packed

_TYPES = {4: ov.Type.u4, 8: ov.Type.u8}
# Operations between a compressed constant and the one that multiplies it.
_CHAIN = {"Convert", "Subtract", "Multiply", "Reshape", "Transpose"}


def weight_of(blocked: Blocked, name: str) -> ov.Output:
    """Returns the weight ``[out, in]`` in float32, computed from constants of few bits.

    Args:
        blocked: The weight.
        name: Name of the constant.
    """
    rows, blocks, size = blocked.values.shape
    values = _constant(blocked.values, blocked.bits, [rows, blocks, size])
    values.set_friendly_name(name)
    first = blocked.zero_points.flat[0]
    if (blocked.zero_points == first).all():
        zeros = _constant(np.array([first], np.uint8), blocked.bits, [1, 1, 1])
    else:
        zeros = _constant(blocked.zero_points, blocked.bits, [rows, blocks, 1])
    scales: Any = ops.constant(np.ascontiguousarray(blocked.scales).astype(np.float32).reshape(rows, blocks, 1))
    centered = ops.subtract(ops.convert(values, "f32"), ops.convert(zeros, "f32"))
    shape = ops.constant(np.array([rows, blocks * size], np.int64))
    return ops.reshape(ops.multiply(centered, scales), shape, special_zero=False).output(0)


def product(x: ov.Output, blocked: Blocked, name: str) -> Any:
    """Returns the node that multiplies: a linear layer without its bias.

    Args:
        x: ``[..., in]``, float32, as `ordered` by ``blocked.order``.
        blocked: The weight.
        name: Name of its constant.
    """
    return ops.matmul(x, weight_of(blocked, name), False, True)


def ordered(x: ov.Output, order: NDArray[np.int64] | None) -> ov.Output:
    """Returns ``x`` with its last axis in the order of a weight's columns."""
    if order is None:
        return x
    return ops.gather(x, ops.constant(order), ops.constant(np.int64(-1))).output(0)


def pack_linears(model: ov.Model, layers: Iterable[tuple[str, QuantizedLinear]]) -> None:
    """Replaces float32 weights of a model by the packed ones of which they are the exact values; in place.

    A weight is found by its content, whatever it is called in the model.

    Args:
        model: Multiplies by ``layer.dequantized()`` for each layer, or by its transpose.
        layers: Names and layers.

    Raises:
        ModelLoadError: The model does not have the weight of some layer as it is.
    """
    products = _products(model)
    inputs: dict[tuple[str, int, bytes], ov.Output] = {}
    for name, layer in layers:
        weight = layer.dequantized()
        # Layers may be equal, so that one's products are the other's, too.
        matmuls = products.get(_identity(weight, by_row=True)) or products.get(_identity(weight.T, by_row=False))
        if matmuls is None:
            raise ModelLoadError(
                f"the exported model does not multiply by the weight of {name} as the checkpoint has it, so that it "
                "cannot be kept in few bits; set generate.weights: f32."
            )
        blocked = layer.blocked()
        for matmul in matmuls:
            source = matmul.input(0).get_source_output()
            # Layers that share an input and its order share the operation that orders it.
            key = (source.get_node().get_name(), source.get_index(), _bytes(blocked.order))
            x = inputs.setdefault(key, ordered(source, blocked.order))
            packed = product(x, blocked, f"{name}.weight")
            packed.set_friendly_name(matmul.get_friendly_name())
            packed.output(0).get_tensor().set_names(matmul.output(0).get_names())
            for user in matmul.output(0).get_target_inputs():
                user.replace_source_output(packed.output(0))
    model.validate_nodes_and_infer_types()


def _products(model: ov.Model) -> dict[tuple[Any, ...], list[Any]]:
    """Returns the matrix products with a constant, by the constant's identity."""
    products: dict[tuple[Any, ...], list[Any]] = {}
    for operation in model.get_ops():
        if operation.get_type_name() != "MatMul" or operation.get_attributes()["transpose_a"]:
            continue
        constant = operation.input(1).get_source_output().get_node()
        if constant.get_type_name() == "Constant" and constant.get_element_type() == ov.Type.f32:
            by_row = bool(operation.get_attributes()["transpose_b"])
            products.setdefault(_identity(constant.data, by_row=by_row), []).append(operation)
    return products


def _identity(weight: NDArray[Any], *, by_row: bool) -> tuple[Any, ...]:
    return by_row, *_digest(weight)


def _digest(weight: NDArray[Any]) -> tuple[tuple[int, ...], bytes]:
    content = np.ascontiguousarray(weight).reshape(-1).view(np.uint8).data
    return weight.shape, blake3(max_threads=blake3.AUTO).update(content).digest()


def _bytes(order: NDArray[np.int64] | None) -> bytes:
    return b"" if order is None else order.tobytes()


def _constant(values: Integers, bits: int, shape: list[int]) -> Any:
    data = ov.Tensor(packed(values, bits), ov.Shape(shape), _TYPES[bits])
    return ops.constant(data, shared_memory=False)


def name_weights(model: ov.Model, named: Iterable[tuple[str, NDArray[Any]]]) -> None:
    """Gives the weights of linear layers and embeddings names that mean something; in place.

    Args:
        model: Has them as float32.
        named: Names and weights, of which the model may have the transposed ones.
    """
    constants = {_digest(node.data): node for node in _weights(model) if node.get_element_type() == ov.Type.f32}
    for name, weight in named:
        for form in (weight, weight.T):
            if (node := constants.get(_digest(form))) is not None:
                node.set_friendly_name(name)
                break


def formats_of(model: ov.Model) -> dict[str, Any]:
    """Returns the formats of linear layers and embeddings: their numbers as ``layers``, by format, and ``names``.

    Layers with the same name but for numbers are named once, with ``*``.
    """
    layers: Counter[str] = Counter()
    names: dict[str, set[str]] = {}
    for name, form in weight_formats(model):
        layers[form] += 1
        names.setdefault(form, set()).add(re.sub(r"\b\d+\b", "*", name.removesuffix(".weight")))
    return {
        "layers": dict(sorted(layers.items())),
        "names": {form: sorted(names[form]) for form in sorted(names)},
    }


def weight_formats(model: ov.Model) -> Iterator[tuple[str, str]]:
    """Yields the name and the format of each weight of linear layers and embeddings."""
    for node in _weights(model):
        yield node.get_friendly_name(), node.get_element_type().get_type_name()


def _weights(model: ov.Model) -> Iterator[Any]:
    seen = set()
    for operation in model.get_ops():
        kind = operation.get_type_name()
        if kind not in {"MatMul", "Gather"}:
            continue
        node = operation.input(int(kind == "MatMul")).get_source_output().get_node()
        while node.get_type_name() in _CHAIN:
            node = node.input(0).get_source_output().get_node()
        is_weight = node.get_type_name() == "Constant" and len(node.get_output_shape(0)) >= 2
        if is_weight and node.get_name() not in seen:
            seen.add(node.get_name())
            yield node
