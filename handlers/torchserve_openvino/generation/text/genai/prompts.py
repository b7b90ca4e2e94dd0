"""Prompts in the engine: what it accepts, their sequences, and what becomes of these in their streams."""

import math
from dataclasses import dataclass, field

from torchserve_openvino.errors import GenerationError, InvalidInputError
from torchserve_openvino.generation.text.engine import (
    Finish,
    GeneratedToken,
    Piece,
    PromptStream,
    Sampling,
    check_sampling,
)
from torchserve_openvino.generation.text.genai.engine_messages import End, SequenceUpdate
from torchserve_openvino.generation.text.genai.pipeline import PAGE


@dataclass(frozen=True)
class EngineLimits:
    """What the engine accepts.

    Attributes:
        max_length: Longest sequence in tokens, prompt and answer together.
        pages: Pages of the cache.
        max_waiting: Most prompts that wait for pages.
        vocabulary: Token ids are less than this.
        guesses: Tokens that each step guesses for each sequence, which needs room for them beyond its end.
        step_tokens: Most tokens that one step computes.
    """

    max_length: int
    pages: int
    max_waiting: int
    vocabulary: int
    guesses: int = 0
    step_tokens: int = 256

    @property
    def sequences(self) -> int | None:
        """How many sequences may run at once; None for as many as have pages.

        The guesses of all must fit into one step: OpenVINO GenAI 2026.4 may give out a guess unchecked if a step
        computes only some of a sequence's.
        """
        return self.step_tokens // (1 + self.guesses) if self.guesses else None


@dataclass(eq=False)
class Live:
    """A sequence in the pipeline.

    Attributes:
        number: Its number there.
        choices: The choices that get its tokens: several if all choose the best token.
        ended: Whether it has ended.
    """

    number: int
    choices: tuple[int, ...]
    ended: bool = False


@dataclass(eq=False)
class AcceptedPrompt:
    """A prompt that the engine accepted.

    Attributes:
        tokens: Token ids.
        sampling: How its tokens are chosen.
        pages: Pages that its sequences need at most.
        sequences: How many of them run.
        stream: Where its pieces go.
        live: Its sequences in the pipeline.
        failed: Whether its stream has ended with an error.
    """

    tokens: tuple[int, ...]
    sampling: Sampling
    pages: int
    sequences: int
    stream: PromptStream = field(init=False)
    live: list[Live] = field(default_factory=list)
    failed: bool = False


def checked(prompt: tuple[int, ...], sampling: Sampling, limits: EngineLimits) -> AcceptedPrompt:
    """Returns a prompt that the engine accepts.

    Raises:
        InvalidInputError: It does not; the message has the numbers.
    """
    if not prompt:
        raise InvalidInputError("the prompt has no tokens; it needs at least one.")
    wrong = next((at for at, token in enumerate(prompt) if not 0 <= token < limits.vocabulary), None)
    if wrong is not None:
        raise InvalidInputError(
            f"token {wrong} of the prompt is {prompt[wrong]}; tokens are 0 to {limits.vocabulary - 1}."
        )
    most = 1 if sampling.temperature == 0 and sampling.repetition_penalty == 1 else 0
    check_sampling(sampling, most, ": OpenVINO GenAI gives the chosen token's log probability, no others")
    length = len(prompt) + sampling.max_tokens
    if length > limits.max_length:
        raise InvalidInputError(
            f"the prompt has {len(prompt)} tokens, and max_tokens is {sampling.max_tokens}: {length} together, "
            f"more than {limits.max_length} (generate.max_length)."
        )
    sequences = 1 if sampling.temperature == 0 else sampling.n
    pages = sequences * math.ceil((length + limits.guesses) / PAGE)
    if pages > limits.pages:
        raise InvalidInputError(
            f"n={sampling.n} sequences of up to {length} tokens need room for {pages * PAGE} tokens in the cache, "
            f"which has {limits.pages * PAGE} (generate.cache_gb)."
        )
    if limits.sequences is not None and sequences > limits.sequences:
        raise InvalidInputError(
            f"n={sampling.n} sequences do not run at once: one step checks the guesses of {limits.sequences} "
            "(generate.step_tokens, generate.prompt_lookup_tokens)."
        )
    return AcceptedPrompt(prompt, sampling, pages, sequences)


def pass_on(prompt: AcceptedPrompt, live: Live, news: SequenceUpdate) -> None:
    """Puts new tokens of a sequence, and its end, into the stream."""
    live.ended = news.end is not None
    if prompt.failed:
        return
    finish: Finish | None = None
    match news.end:
        case End.STOP:
            finish = "stop"
        case End.LENGTH:
            finish = "length"
        case End.CANCELLED:
            finish = "cancelled"
    if news.tokens or finish is not None:
        logprobs = prompt.sampling.logprobs
        tokens = tuple(
            GeneratedToken(token)
            if logprobs is None
            else GeneratedToken(token, logprob, ((token, logprob),) if logprobs else ())
            for token, logprob in zip(news.tokens, news.logprobs, strict=True)
        )
        for choice in live.choices:
            prompt.stream.put(Piece(choice, tokens, finish))
    if news.end in {End.NO_ROOM, End.FAILED}:
        prompt.failed = True
        prompt.stream.fail(GenerationError(news.reason or "the cache of keys and values is full."))


def end_all(prompt: AcceptedPrompt, finish: Finish) -> None:
    """Ends the choices that have not ended."""
    ended = {choice for live in prompt.live if live.ended for choice in live.choices}
    for choice in range(prompt.sampling.n):
        if choice not in ended:
            prompt.stream.put(Piece(choice, finish=finish))
    for live in prompt.live:
        live.ended = True


def open_choices(prompt: AcceptedPrompt) -> int:
    """Returns how many choices have not ended."""
    if not prompt.live:
        return prompt.sampling.n
    return sum(len(live.choices) for live in prompt.live if not live.ended)
