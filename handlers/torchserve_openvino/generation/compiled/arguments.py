"""Which calls of `generate` compiled graphs serve; found out before a token is generated."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from torchserve_openvino.generation.compiled.layout import IDS, GraphLayout, GraphSizes, model_input

# Settings of transformers' GenerationConfig that need more of a model than logits of its last token.
_UNSERVED = (
    "output_attentions", "output_hidden_states", "cache_implementation", "prompt_lookup_num_tokens",
    "assistant_early_exit", "dola_layers", "penalty_alpha", "prefill_chunk_size", "low_memory",
    "return_token_timestamps",
)  # fmt: skip
# Arguments of `generate` itself, and those for the model, that graphs or transformers' loop take.
_OF_GENERATE = {
    "self", "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    "streamer", "tokenizer",
}  # fmt: skip
_OF_MODEL = {
    IDS, "attention_mask", "position_ids", "decoder_input_ids", "decoder_attention_mask", "encoder_outputs",
    "use_cache", "return_dict",
}  # fmt: skip
# What transformers generates where nobody says how much.
_USUAL_NEW = 20


class Arguments:
    """Reads the arguments of a model's `generate`.

    Args:
        model: The model.
        function: Its `generate`, as a function.
    """

    def __init__(self, model: Any, function: Callable[..., Any]) -> None:
        self._model, self._signature = model, inspect.signature(function)
        # What a model's own `generate` adds, as Whisper's does, it uses by itself.
        self._own = set(self._signature.parameters) - set(inspect.signature(GenerationMixin.generate).parameters)
        self._settings = set(vars(GenerationConfig()))

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call by name, without those that are None."""
        bound = self._signature.bind(self._model, *args, **kwargs)
        arguments = {**bound.arguments}
        rest = next((p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
        arguments |= arguments.pop(rest, {})
        arguments.pop("self", None)
        return {name: value for name, value in arguments.items() if value is not None}

    def setting(self, arguments: Mapping[str, Any], name: str) -> Any:
        """Returns a setting of a call: its own, or that of its configuration, or the model's; None if unset."""
        if name in arguments:
            return arguments[name]
        for config in (arguments.get("generation_config"), self._model.generation_config):
            if (value := getattr(config, name, None)) is not None:
                return value
        return None

    def source(self, arguments: Mapping[str, Any]) -> Any:
        """Returns the model's main input; None if the call has none."""
        return arguments.get("inputs", arguments.get(model_input(self._model)))

    def why_not(self, arguments: Mapping[str, Any], sizes: GraphSizes, layout: GraphLayout) -> str:
        """Returns why compiled graphs do not serve a call; empty if they do.

        Args:
            arguments: What `named` returns.
            sizes: What is compiled.
            layout: What the graphs take and give.
        """
        for name in _UNSERVED:
            if (value := self.setting(arguments, name)) not in (None, False):
                return f"{name} is {value!r}, which compiled graphs do not serve"
        if (scale := self.setting(arguments, "guidance_scale")) not in (None, 1, 1.0):
            return f"guidance_scale is {scale}, which compiled graphs do not serve"
        known = _OF_GENERATE | _OF_MODEL | self._settings | self._own | {model_input(self._model)}
        for name in arguments:
            if name not in known and arguments[name] is not False:
                return f"{name} is given, which compiled graphs do not take"
        return self._too_long(arguments, sizes, layout)

    def _too_long(self, arguments: Mapping[str, Any], sizes: GraphSizes, layout: GraphLayout) -> str:
        source = self.source(arguments)
        if sizes.features and isinstance(source, Tensor) and tuple(source.shape[1:]) != sizes.features:
            return f"the input has shape {list(source.shape[1:])}; {list(sizes.features)} was compiled"
        if sizes.texts and isinstance(source, Tensor) and source.shape[1] > max(sizes.texts):
            return (
                f"the input has {source.shape[1]} tokens; the encoder takes up to {max(sizes.texts)} "
                "(handler.openvino.generate.max_length)"
            )
        ids = arguments.get("decoder_input_ids") if layout.encodes else source
        total, prompt = self._total(arguments, int(ids.shape[1]) if isinstance(ids, Tensor) else 1)
        if total <= sizes.places:
            return ""
        return (
            f"the sequence has {prompt} tokens, and gets up to {total}; {sizes.places} were compiled "
            "(handler.openvino.generate.max_length)"
        )

    def _total(self, arguments: Mapping[str, Any], prompt: int) -> tuple[int, int]:
        """Returns how many tokens the sequence has at most, and how many its beginning has."""
        new, most = self.setting(arguments, "max_new_tokens"), self.setting(arguments, "max_length")
        if new is not None:
            return prompt + int(new), prompt
        if most is not None:
            return int(most), prompt
        total, bound = prompt + _USUAL_NEW, getattr(self._model.config, "max_position_embeddings", None)
        return (min(total, bound) if isinstance(bound, int) else total), prompt
