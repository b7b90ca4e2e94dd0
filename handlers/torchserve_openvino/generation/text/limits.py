"""What an engine accepts: prompts, lengths, and how tokens are chosen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchserve_openvino.errors import InvalidInputError
from torchserve_openvino.generation.text.engine import Sampling


@dataclass(frozen=True)
class StepLimits:
    """What an engine accepts.

    Attributes:
        max_length: Longest sequence in tokens, prompt and answer together.
        max_waiting: Most sequences that wait.
        eos: Tokens that end a sequence.
        running: Most sequences that run, each with memory for its keys and values.
        vocabulary: Token ids are less than this; None where it is not known.
    """

    max_length: int
    max_waiting: int
    eos: frozenset[int]
    running: int = 8
    vocabulary: int | None = None


def check_prompt(prompt: Sequence[int], answered: int, sampling: Sampling, limits: StepLimits) -> None:
    """Raises InvalidInputError for a prompt, with ``answered`` tokens of its answer, that an engine does not accept."""
    length = len(prompt) + answered + sampling.max_tokens
    if not prompt or length > limits.max_length:
        raise InvalidInputError(
            f"the prompt has {len(prompt)} tokens, and max_tokens is {sampling.max_tokens}: {length} together, of "
            f"at most {limits.max_length} (generate.max_length), and at least one of the prompt."
        )
    if limits.vocabulary is not None:
        wrong = next((at for at, token in enumerate(prompt) if not 0 <= token < limits.vocabulary), None)
        if wrong is not None:
            raise InvalidInputError(
                f"token {wrong} of the prompt is {prompt[wrong]}; tokens are 0 to {limits.vocabulary - 1}."
            )
    check_sampling(sampling, limits.vocabulary)


def check_sampling(sampling: Sampling, most_logprobs: int | None = None, why: str = "") -> None:
    """Raises InvalidInputError for a parameter out of range.

    Args:
        sampling: How tokens are chosen.
        most_logprobs: How many tokens can be listed; None for any number.
        why: Why not more.
    """
    most = sampling.logprobs if most_logprobs is None else most_logprobs
    rules = {
        "max_tokens must be at least 1": sampling.max_tokens >= 1,
        "n must be at least 1": sampling.n >= 1,
        "temperature must be 0 (greedy) or more": 0 <= sampling.temperature < math.inf,
        "top_p must be above 0, and at most 1": 0 < sampling.top_p <= 1,
        "top_k must be 0 (all) or more": sampling.top_k >= 0,
        "repetition_penalty must be above 0": 0 < sampling.repetition_penalty < math.inf,
        "logprobs must be 0 or more": sampling.logprobs is None or sampling.logprobs >= 0,
        f"logprobs can be at most {most} here{why}": sampling.logprobs is None or sampling.logprobs <= (most or 0),
    }
    for rule, holds in rules.items():
        if not holds:
            name = rule.split()[0]
            raise InvalidInputError(f"{rule}; it is {getattr(sampling, name)}.")
