"""Lets transformers' own `generate` run by compiled graphs: a model that looks like the original, with other calls.

transformers' loop stays in charge: sampling, beams, penalties, stopping criteria, and what models add to it (Whisper's
long recordings). Its own cache is replaced at the first call of a sequence, through the output of that call.
"""

import copy
import functools
import inspect
import types
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from torchserve_openvino.errors import InvalidInputError
from torchserve_openvino.generation.compiled.compiled_generation import CompiledGeneration
from torchserve_openvino.generation.compiled.layout import IDS, encoder_of, model_input

# Arguments of forward that ask for what the graphs do not give.
_OUTPUTS = ("output_attentions", "output_hidden_states")
_UNUSED = (*_OUTPUTS, "labels", "inputs_embeds", "decoder_inputs_embeds")


def with_compiled_forward(compiled: CompiledGeneration) -> Any:
    """Returns a model whose `generate` and calls run by compiled graphs.

    It shares its modules with the original, which stays as it is. Sequences may have up to `Sizes.places` tokens.
    Calls that the graphs do not serve raise InvalidInputError: other inputs than tokens, attentions and hidden states
    as outputs, `cache_implementation`, assisted decoding.
    """
    original: Any = compiled.model
    # A shallow copy has attributes of its own, and shares the modules.
    face = copy.copy(original)
    forward = _Forward(compiled)

    @functools.wraps(type(original).forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    face.forward = types.MethodType(call, face)
    if compiled.layout.encodes:
        encoder = _EncoderProxy(compiled)
        face.get_encoder = lambda modality=None: encoder
    return face


class _EncoderProxy:
    """Stands for the encoder."""

    def __init__(self, compiled: CompiledGeneration) -> None:
        self._compiled, self._original = compiled, encoder_of(compiled.model)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._original, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        arguments = inspect.signature(self._original.forward).bind(*args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        _refuse(arguments, {model_input(self._compiled.model), "attention_mask"})
        values = arguments[model_input(self._compiled.model)]
        texts = not values.is_floating_point()
        return BaseModelOutput(self._compiled.encode(values, arguments.get("attention_mask") if texts else None))


class _Forward:
    """Calls of the whole model."""

    def __init__(self, compiled: CompiledGeneration) -> None:
        self._compiled, self._layout = compiled, compiled.layout
        self._signature = inspect.signature(type(compiled.model).forward)
        self._known = {
            IDS, "decoder_input_ids", "encoder_outputs", "attention_mask", "logits_to_keep", "cache_position",
            model_input(compiled.model), self._layout.cache, self._layout.mask, self._layout.positions,
        }  # fmt: skip

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput

        arguments = self._signature.bind(None, *args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        _refuse(arguments, self._known)
        layout = self._layout
        ids = arguments.get("decoder_input_ids" if layout.encodes else IDS)
        if ids is None or ids.shape[1] == 0:
            raise InvalidInputError("a compiled model generates from tokens; there are none")
        hidden = self._hidden(arguments) if layout.encodes else None
        cache = arguments.get(layout.cache)
        mask = arguments.get(layout.mask) if layout.mask else None
        if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.dim() != 2):
            raise InvalidInputError(
                "a compiled model has a cache of its own: call generate without cache_implementation"
            )
        if not self._is_ours(cache):
            if cache is not None and int(cache.get_seq_length()):
                raise InvalidInputError("the given cache holds tokens of a model that is not compiled")
            cache = self._compiled.cache(len(ids), hidden)
        elif ids.shape[1] > 1 and (layout.encodes or arguments.get("logits_to_keep", 1) != 1):
            raise InvalidInputError("a compiled model gives the logits of the last token only: no assisted decoding")
        source = arguments.get("attention_mask") if layout.masks_source else None
        if layout.masks_source and source is None and hidden is not None:
            # As many places as there are: the compiled graph has further ones.
            source = torch.ones(hidden.shape[:2], dtype=torch.int64)
        with torch.no_grad():
            logits = self._compiled.run(
                cache, ids, mask=mask, positions=arguments.get(layout.positions) if layout.positions else None,
                source=source,
            )[:, None]  # fmt: skip
        cached = {layout.cache: cache if arguments.get("use_cache") is not False else None}
        if hidden is not None:
            return Seq2SeqLMOutput(logits=logits, encoder_last_hidden_state=hidden, **cached)
        return CausalLMOutputWithPast(logits=logits, **cached)

    def _hidden(self, arguments: dict[str, Any]) -> Tensor:
        outputs = arguments.get("encoder_outputs")
        if outputs is not None:
            states: Tensor = outputs[0]
            return states
        values = arguments.get(model_input(self._compiled.model))
        if values is None:
            raise InvalidInputError("a model with an encoder needs its input, or encoder_outputs")
        texts = not values.is_floating_point()
        return self._compiled.encode(values, arguments.get("attention_mask") if texts else None)

    def _is_ours(self, cache: Any) -> bool:
        from torchserve_openvino.generation.compiled.caches import Kept, own_layers

        layers = own_layers(cache) if cache is not None else []
        return bool(layers) and isinstance(layers[0], Kept)


def _refuse(arguments: dict[str, Any], known: Container[str]) -> None:
    """Refuses what the graphs do not give, or do not take."""
    for name in _UNUSED:
        if (value := arguments.get(name)) is not None and value is not False:
            raise InvalidInputError(f"{name} is not supported by a compiled model: leave it out")
    for name, value in arguments.items():
        if name not in known and isinstance(value, Tensor):
            raise InvalidInputError(f"{name} is not taken by a compiled model: leave it out")
