"""The engine without OpenVINO: the model in eager PyTorch, one step of one sequence after the other.

It serves `pt2.compile.enable: false`, to compare with and to look for faults; it is not made to be fast.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.generation.text.engine import StepLimits
from torchserve_openvino.generation.text.exporting.exported_language_model import cache_argument
from torchserve_openvino.generation.text.stepping_engine import Rule, SteppingEngine


class EagerSteps:
    """Steps of a model in eager PyTorch; implements `stepping.Steps`.

    Args:
        model: A language model of transformers, with or without an encoder.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.encodes = bool(getattr(self.model.config, "is_encoder_decoder", False))
        self.first = first_token(self.model) if self.encodes else None

    def begin(self, prompt: Sequence[int]) -> "EagerWork":
        """Returns a sequence for which nothing was computed yet."""
        return EagerWork(self, prompt)


class EagerWork:
    """One sequence; implements `stepping.Work`.

    Attributes:
        tokens: Tokens of the decoder.
    """

    def __init__(self, steps: EagerSteps, prompt: Sequence[int]) -> None:
        self._steps, self._prompt = steps, tuple(prompt)
        self.tokens = list(prompt) if steps.first is None else [steps.first]
        self._fed = 0
        self._past: dict[str, Any] = {}

    def advance(self) -> Tensor:
        """Computes the logits after the last token."""
        if not self._past:
            self._past = self._begun()
        ids = torch.tensor([self.tokens[self._fed :]])
        name = "decoder_input_ids" if self._steps.encodes else "input_ids"
        # The cache is an object that the model adds to.
        output = self._steps.model(**{name: ids}, use_cache=True, **self._past)
        self._fed = len(self.tokens)
        logits: Tensor = output.logits[0, -1]
        return logits

    def _begun(self) -> dict[str, Any]:
        """Returns the arguments that hold what was computed; the cache's name depends on transformers' version."""
        # Imported here: it takes seconds, which only workers of models of transformers need.
        from transformers import DynamicCache, EncoderDecoderCache

        model = self._steps.model
        if not self._steps.encodes:
            return {cache_argument(model): DynamicCache(config=model.config)}
        outputs = model.get_encoder()(input_ids=torch.tensor([self._prompt]))
        return {cache_argument(model): EncoderDecoderCache(DynamicCache(), DynamicCache()), "encoder_outputs": outputs}


def first_token(model: Any) -> int:
    """Returns the token that the decoder of a model with an encoder begins with.

    Raises:
        ModelLoadError: Its configuration names none.
    """
    for config in (getattr(model, "generation_config", None), model.config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            if isinstance(token := getattr(config, name, None), int):
                return token
    raise ModelLoadError(
        f"{type(model).__name__} names no decoder_start_token_id in generation_config.json or config.json, with which "
        "its decoder begins."
    )


class EagerEngine(SteppingEngine):
    """Generates in eager PyTorch.

    Args:
        model: A language model of transformers, with or without an encoder.
        max_length: Longest sequence in tokens.
        max_waiting: Most sequences that wait.
        eos: Tokens that end a sequence.
        rule: What the model itself demands of its tokens.
    """

    def __init__(
        self, model: nn.Module, *, max_length: int, max_waiting: int, eos: frozenset[int], rule: Rule | None = None
    ) -> None:
        super().__init__(EagerSteps(model), StepLimits(max_length, max_waiting, eos), rule)
