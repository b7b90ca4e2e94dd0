"""Exports a causal language model: its forward with keys and values of past tokens, as one OpenVINO model.

Everything must convert: there is no eager PyTorch beside this model that could compute the rest.
"""

import inspect
import logging
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from torch import Tensor, nn

from torchserve_openvino.backend.upstream._openvino_private import exported_to_model, make_stateful, page_attention
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.ops.rule_registry import computes

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# --- turns keys and values that go in and out of a model into its state, in the form that OpenVINO GenAI takes ----
# GenAI finds inputs and outputs by name; the names are those of optimum-intel's models.


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


# --- exports a causal language model: its forward with keys and values of past tokens, as one OpenVINO model ------


logger = logging.getLogger(__name__)

# Sizes of the example: batch, new tokens, past tokens. torch.export would take 0 and 1 for constants.
_BATCH, _NEW, _PAST = 2, 3, 4


# Lines of OpenVINO's messages that say nothing of the cause.
_FRAME = re.compile(r"^(Exception from|Check '|FrontEnd API failed|Model wasn't fully|Summary:)")


@dataclass(frozen=True)
class ExportedLanguageModel:
    """A language model that keeps its past as state.

    Attributes:
        model: Takes ``input_ids``, ``attention_mask``, ``position_ids`` and ``beam_idx``; gives ``logits``.
        layers: What each layer caches.
        vocabulary: How many tokens it knows.
        operators: ATen operators of the exported graph that do work; all of them were converted.
        keep_alive: Owns the memory of the model's constants.
    """

    model: ov.Model
    layers: tuple[CacheShape, ...]
    vocabulary: int
    operators: int
    keep_alive: Any


class _WithPast(nn.Module):
    """The model's forward with the cache as plain tensors, in and out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        cache = _cache_of(past)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=True,
            **{cache_argument(self.model): cache},
        )
        return output.logits, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))


def cache_argument(model: nn.Module) -> str:
    """Returns the name of the argument that takes the cache: ``cache`` from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _cache_of(past: list[Tensor]) -> Any:
    """Returns transformers' cache over given keys and values, without copying them."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache()
    for keys, values in zip(past[::2], past[1::2], strict=True):
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def export(model: nn.Module) -> ExportedLanguageModel:
    """Exports a causal language model of transformers, in evaluation mode and float32.

    Raises:
        ModelLoadError: It can't be exported, some operator has no conversion, or its attention can't be paged.
    """
    name = type(model).__name__
    if reason := unpaged(model.config, inspect.signature(model.forward).parameters, name):
        raise ModelLoadError(reason)
    with torch.no_grad():
        layers = _cached_by(model)
        program = _traced(model, layers)
        try:
            converted, keep_alive = exported_to_model(program)
        except Exception as error:
            # OpConversionFailure derives from Exception; a translator may raise anything.
            raise ModelLoadError(f"{name} has operators that OpenVINO cannot convert: {_lines(error)}") from error
    keep_past(converted, layers)
    _check_paging(converted, len(layers), name)
    counted = sum(node.op == "call_function" and computes(node.target) for node in program.graph.nodes)
    vocabulary = converted.output("logits").get_partial_shape()[2]
    known = vocabulary.get_length() if vocabulary.is_static else int(getattr(model.config, "vocab_size", 0))
    return ExportedLanguageModel(converted, layers, known, counted, keep_alive)


def unpaged(config: Any, arguments: Collection[str], name: str) -> str:
    """Returns why a model's attention can't be paged, by its class; empty if nothing speaks against it.

    Args:
        config: The model's own configuration.
        arguments: Names of its forward's arguments.
        name: Its class.
    """
    attention = getattr(config, "_attn_implementation", None)
    if attention != "sdpa":
        return f"{name} does not support PyTorch's scaled_dot_product_attention, only {attention}."
    if "position_ids" not in arguments:
        return f"{name} takes no position_ids, so that its positions cannot be given token by token."
    return ""


def _cached_by(model: nn.Module) -> tuple[CacheShape, ...]:
    """Runs one token, and returns what each layer caches for it."""
    cache = _cache_of([])
    name = type(model).__name__
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=True, **{cache_argument(model): cache})
        shapes = [(layer.keys.shape, layer.values.shape) for layer in cache.layers]
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ModelLoadError(
            f"{name} does not keep keys and values of each layer in a DynamicCache: {_lines(error)}"
        ) from error
    if not shapes:
        raise ModelLoadError(f"{name} caches nothing.")
    return tuple(CacheShape(keys[1], keys[3], values[3]) for keys, values in shapes)


def _traced(model: nn.Module, layers: tuple[CacheShape, ...]) -> "ExportedProgram":
    free = torch.export.Dim.DYNAMIC
    past = [
        torch.zeros(_BATCH, layer.heads, _PAST, features)
        for layer in layers
        for features in (layer.key_features, layer.value_features)
    ]
    ids = torch.zeros(_BATCH, _NEW, dtype=torch.int64)
    mask = torch.ones(_BATCH, _PAST + _NEW, dtype=torch.int64)
    positions = torch.arange(_PAST, _PAST + _NEW).expand(_BATCH, _NEW).contiguous()
    pair, cached = {0: free, 1: free}, {0: free, 2: free}
    try:
        return torch.export.export(
            _WithPast(model).eval(),
            (ids, mask, positions, past),
            dynamic_shapes=(pair, pair, pair, [cached] * len(past)),
            strict=False,
        )
    except Exception as error:
        # Whatever the model's own code raises while it is traced.
        raise ModelLoadError(
            f"{type(model).__name__} cannot be exported for batches and sequences of any size: {_lines(error)}"
        ) from error


def _check_paging(model: ov.Model, layers: int, name: str) -> None:
    """Tries on a copy what OpenVINO GenAI will do, whose messages name no model."""
    copy = model.clone()
    try:
        page_attention(copy)
    except RuntimeError as error:
        raise ModelLoadError(f"the attention of {name} cannot be paged by OpenVINO: {_lines(error)}") from error
    kinds = [operation.get_type_name() for operation in copy.get_ops()]
    paged = kinds.count("PagedAttentionExtension")
    if paged != layers or "ReadValue" in kinds:
        raise ModelLoadError(f"OpenVINO can page the attention of {paged} of {layers} layers of {name}, not of all.")


def _lines(error: BaseException) -> str:
    """Returns those first lines of a message that say something."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip() and not _FRAME.search(line)]
    return " ".join(lines[:3])[:500] or type(error).__name__
