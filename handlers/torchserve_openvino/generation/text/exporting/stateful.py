"""Turns keys and values that go in and out of a model into its state, in the form that OpenVINO GenAI takes.

GenAI finds inputs and outputs by name; the names are those of optimum-intel's models.
"""

from typing import NamedTuple

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from torchserve_openvino.backend.upstream._openvino_private import make_stateful
from torchserve_openvino.errors import ModelLoadError

TOKENS = ("input_ids", "attention_mask", "position_ids")


class CacheShape(NamedTuple):
    """What a layer caches of a token: heads, and the features of each of a key and a value."""

    heads: int
    key_features: int
    value_features: int


def keep_past(model: ov.Model, layers: tuple[CacheShape, ...]) -> None:
    """Makes the cache a state of the model, in place.

    Args:
        model: Takes token ids, mask and positions, then keys and values of each layer; gives logits, then the same.
        layers: What each layer caches.

    Raises:
        ModelLoadError: The model has other inputs or outputs, since some were not used.
    """
    kinds = [(layer, kind) for layer in range(len(layers)) for kind in ("key", "value")]
    past = [f"past_key_values.{layer}.{kind}" for layer, kind in kinds]
    present = [f"present.{layer}.{kind}" for layer, kind in kinds]
    inputs, outputs = [*TOKENS, *past], ["logits", *present]
    if len(model.inputs) != len(inputs) or len(model.outputs) != len(outputs):
        raise ModelLoadError(
            f"the exported model has {len(model.inputs)} inputs and {len(model.outputs)} outputs, not {len(inputs)} "
            f"and {len(outputs)}: it does not use all keys and values."
        )
    for port, name in zip([*model.inputs, *model.outputs], [*inputs, *outputs], strict=True):
        port.get_tensor().set_names({name})
    for name, (layer, kind) in zip(past, kinds, strict=True):
        shape = layers[layer]
        features = shape.key_features if kind == "key" else shape.value_features
        model.input(name).get_node().set_partial_shape(ov.PartialShape([-1, shape.heads, -1, features]))
    for name in TOKENS:
        model.input(name).get_node().set_partial_shape(ov.PartialShape([-1, -1]))
    model.validate_nodes_and_infer_types()
    _reorder(model, past)
    make_stateful(model, dict(zip(past, present, strict=True)))
    _start_empty(model)
    model.validate_nodes_and_infer_types()


def _reorder(model: ov.Model, past: list[str]) -> None:
    """Adds the input ``beam_idx``: which row of the batch each row continues."""
    beams = ops.parameter(ov.PartialShape([-1]), ov.Type.i32, name="beam_idx")
    beams.output(0).get_tensor().add_names({"beam_idx"})
    model.add_parameters([beams])
    for name in past:
        port = model.input(name)
        users = port.get_target_inputs()
        chosen = ops.gather(port, beams, ops.constant(0))
        for user in users:
            user.replace_source_output(chosen.output(0))
    model.validate_nodes_and_infer_types()


def _start_empty(model: ov.Model) -> None:
    """Starts each variable with no tokens, and as many rows as the batch has."""
    rows = ops.gather(ops.shape_of(model.input("input_ids"), output_type="i64"), ops.constant([0]), ops.constant(0))
    for operation in model.get_ops():
        if operation.get_type_name() == "ReadValue":
            shape = operation.get_output_partial_shape(0)
            sizes = [rows] + [
                ops.constant(np.array([size.get_length() if size.is_static else 0], dtype=np.int64))
                for size in list(shape)[1:]
            ]
            zero = ops.constant(0.0, dtype=operation.get_output_element_type(0))
            operation.set_arguments([ops.broadcast(zero, ops.concat(sizes, axis=0))])
