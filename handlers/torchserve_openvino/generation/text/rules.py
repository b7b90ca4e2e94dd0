"""What a model's generation_config.json demands of its tokens, whatever a request asks: forced and forbidden ones.

How tokens are drawn (temperature, beams, penalties) is the request's affair.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.files.json_text import JsonError, read_json_object

# What `Rules` applies to a model without an encoder.
APPLIED = (
    "bad_words_ids", "begin_suppress_tokens", "forced_eos_token_id", "min_length", "min_new_tokens",
    "no_repeat_ngram_size", "suppress_tokens",
)  # fmt: skip
# Settings that change which tokens may come, and would be lost in silence.
UNSUPPORTED = (
    "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "exponential_decay_length_penalty", "guidance_scale",
    "sequence_bias", "watermarking_config",
)  # fmt: skip
_NEUTRAL: tuple[Any, ...] = (None, 0, 1, 1.0, [], {})
_ABSENT: tuple[Any, ...] = (None, 0, [])


def demanded(folder: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Returns which of some settings the generation_config.json in a model's folder has.

    Raises:
        ModelLoadError: The file can't be read.
    """
    path = folder / "generation_config.json"
    try:
        config = read_json_object(path) if path.is_file() else {}
    except (OSError, JsonError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from error
    return tuple(name for name in names if config.get(name) not in (_ABSENT if name in APPLIED else _NEUTRAL))


class Rules:
    """Changes logits before a token is chosen.

    Args:
        config: The model's generation configuration.
        eos: Tokens that end a sequence.
        encodes: Whether the prompt goes to an encoder, so that the decoder's first token may be forced.
    """

    def __init__(self, config: Any, eos: frozenset[int], *, encodes: bool) -> None:
        self._config, self._eos, self._encodes = config, sorted(eos), encodes
        self.unsupported = tuple(name for name in UNSUPPORTED if getattr(config, name, None) not in _NEUTRAL)
        self._made = _made(config, self._eos)

    def __call__(self, tokens: Sequence[int], generated: int, most: int, logits: Tensor) -> Tensor:
        """Returns the logits for the next token.

        Args:
            tokens: All tokens of the decoder so far.
            generated: How many of them were generated.
            most: How many will be at most.
            logits: float32 ``[vocabulary]``; stays as it is.
        """
        if not self._made and not self._lengths:
            return logits
        ids, scores = torch.tensor([list(tokens)]), logits[None]
        for rule in self._made:
            scores = rule(ids, scores)
        forced = getattr(self._config, "forced_bos_token_id", None)
        if forced is not None and self._encodes and generated == 0:
            return _only(scores[0], [forced])
        last = getattr(self._config, "forced_eos_token_id", None)
        if last is not None and generated == most - 1:
            return _only(scores[0], [last] if isinstance(last, int) else last)
        begin = getattr(self._config, "begin_suppress_tokens", None)
        # As in transformers, where a forced first token comes before.
        if begin and generated == int(forced is not None and self._encodes):
            scores = scores.index_fill(1, torch.tensor(begin), -torch.inf)
        least = self._least(len(tokens) - generated)
        if self._eos and generated < least:
            scores = scores.index_fill(1, torch.tensor(self._eos), -torch.inf)
        return scores[0]

    @property
    def _lengths(self) -> bool:
        names = ("forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens", "min_length", "min_new_tokens")
        return any(getattr(self._config, name, None) not in (None, 0, []) for name in names)

    def _least(self, before: int) -> int:
        """Returns how many tokens have to be generated before the end."""
        whole, new = (getattr(self._config, name, None) or 0 for name in ("min_length", "min_new_tokens"))
        return max(int(new), int(whole) - before)


def _made(config: Any, eos: list[int]) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """Returns transformers' own rules that do not depend on the length."""
    # Imported here: it takes seconds, which only workers of models of transformers need.
    from transformers.generation import logits_process as rules

    processors: list[Callable[[Tensor, Tensor], Tensor]] = []
    if size := getattr(config, "no_repeat_ngram_size", None):
        processors.append(rules.NoRepeatNGramLogitsProcessor(size))
    if words := getattr(config, "bad_words_ids", None):
        processors.append(rules.NoBadWordsLogitsProcessor(words, eos or None))
    if tokens := getattr(config, "suppress_tokens", None):
        processors.append(rules.SuppressTokensLogitsProcessor(tokens))
    return processors


def _only(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    scores = torch.full_like(logits, -torch.inf)
    scores[list(tokens)] = 0
    return scores
