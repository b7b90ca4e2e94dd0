"""The interface of an engine: it takes prompts as tokens, and gives back tokens as they are generated."""

import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torchserve_openvino.errors import GenerationError, InvalidInputError

# Why a sequence ended: an end-of-text token or a stop text; `max_tokens`; the client gave up; the engine failed.
Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Sampling:
    """How the next tokens are chosen.

    Attributes:
        max_tokens: Most tokens to generate.
        temperature: Divides the logits; 0 takes the most probable token (greedy).
        top_p: Samples among the most probable tokens that together have this probability, in (0, 1].
        top_k: Samples among this many most probable tokens; 0 for all.
        repetition_penalty: Divides the positive logits of tokens seen so far, and multiplies the negative ones.
        seed: Equal seeds give equal tokens, whatever else runs; None for a random one.
        n: Sequences for one prompt.
        logprobs: How many of the most probable tokens to give with each token, with their log probabilities; None for
            none, 0 for the chosen token's own.
        ignore_eos: Goes on after an end-of-text token, up to ``max_tokens``.
        bare: Takes the tokens as the model computes them, whatever its generation_config.json demands.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False
    bare: bool = False


@dataclass(frozen=True)
class GeneratedToken:
    """One generated token.

    Attributes:
        id: Its number in the vocabulary.
        logprob: Its natural log probability; None if it was not asked for.
        top: The most probable tokens at this place with theirs, most probable first; empty if not asked for.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What became known of one sequence: some tokens more, or its end, or both.

    The end-of-text token that ends a sequence is among its tokens.

    Attributes:
        choice: Which of the ``n`` sequences, from 0.
        tokens: New tokens, in order.
        finish: Why the sequence ended; None if it goes on.
    """

    choice: int
    tokens: tuple[GeneratedToken, ...] = ()
    finish: Finish | None = None


class Stream(Protocol):
    """The sequences of one prompt, as they come; iterates over their pieces until each has ended.

    Raises, while iterating:
        GenerationError: The engine failed on this prompt; others go on.
    """

    def __iter__(self) -> Iterator[Piece]: ...

    def next(self, timeout: float) -> Piece | None:
        """Waits for the next piece; None if none came within ``timeout`` seconds. Raises StopIteration at the end."""
        ...

    def cancel(self) -> None:
        """Ends the sequences and frees their cache; pieces that are waiting are still given. Safe to call twice."""
        ...


@dataclass(frozen=True)
class EngineLoad:
    """What an engine does right now, and did since it started.

    Attributes:
        running: Sequences that take part in steps.
        waiting: Prompts that wait for room in the cache.
        cache_usage: Share of the KV cache in use, 0 to 1.
        prompt_tokens: Tokens of prompts, since the start.
        generated_tokens: Tokens generated, since the start.
        prefix_hits: Tokens of prompts whose keys and values were in the cache already, since the start; None where the
            engine does not tell.
        guessed_tokens: Generated tokens that were guessed before they were computed, since the start.
    """

    running: int
    waiting: int
    cache_usage: float
    prompt_tokens: int
    generated_tokens: int
    prefix_hits: int | None = None
    guessed_tokens: int = 0


class Engine(Protocol):
    """Generates tokens; all methods may be called from any thread."""

    @property
    def max_length(self) -> int:
        """Most tokens of one sequence, prompt and answer together."""
        ...

    @property
    def dead(self) -> str | None:
        """Why the engine generates no more; None while it does."""
        ...

    def when_dead(self, call: Callable[[], None]) -> None:
        """Calls something once the engine generates no more, unless it was closed; at once if that is so already."""
        ...

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Stream:
        """Starts a prompt of at least one token.

        Raises:
            InvalidInputError: The prompt and ``max_tokens`` do not fit into ``max_length``, or the whole cache; the
                message has the numbers.
            BusyError: Too many prompts wait (`generate.max_waiting`).
        """
        ...

    def load(self) -> EngineLoad:
        """Returns what it does now."""
        ...

    def close(self) -> None:
        """Ends all sequences, and frees the model."""
        ...


# --- how an engine says that it generates no more -----------------------------------------------------------------


class DiesOnError:
    """An engine that may die; part of `engine.Engine`."""

    def __init__(self) -> None:
        self._dead: str | None = None
        self._when_dead: Callable[[], None] | None = None
        self._deciding = threading.Lock()

    @property
    def dead(self) -> str | None:
        """Why the engine generates no more; None while it does."""
        return self._dead

    def when_dead(self, call: Callable[[], None]) -> None:
        """Calls something once the engine generates no more, unless it was closed; at once if that is so already."""
        with self._deciding:
            self._when_dead = call
            dead = self._dead is not None
        if dead:
            call()

    def _die(self, reason: str) -> Callable[[], None]:
        """Notes why; returns what to call once nobody waits for the engine any more."""
        with self._deciding:
            self._dead = reason
            return self._when_dead or (lambda: None)


# --- the stream of one prompt: the engine's thread puts pieces in, any other thread takes them out ----------------


class PromptStream:
    """The pieces of a prompt's sequences; implements `engine.Stream`.

    Args:
        choices: How many sequences it has.
        cancel: Called by `cancel`.
    """

    def __init__(self, choices: int, cancel: Callable[[], None]) -> None:
        self._pieces: queue.SimpleQueue[Piece | GenerationError] = queue.SimpleQueue()
        self._open = choices
        self._cancel = cancel

    def put(self, piece: Piece) -> None:
        """Adds a piece."""
        self._pieces.put(piece)

    def fail(self, error: GenerationError) -> None:
        """Ends the stream with an error."""
        self._pieces.put(error)

    def __iter__(self) -> Iterator[Piece]:
        """Yields pieces until each sequence has ended. Raises GenerationError."""
        while self._open:
            yield self._taken(self._pieces.get())

    def next(self, timeout: float) -> Piece | None:
        """Waits for the next piece; None if none came within ``timeout`` seconds.

        Raises:
            StopIteration: Each sequence has ended.
            GenerationError: The engine failed on this prompt.
        """
        if not self._open:
            raise StopIteration
        try:
            return self._taken(self._pieces.get(timeout=timeout))
        except queue.Empty:
            return None

    def cancel(self) -> None:
        """Ends the sequences and frees their cache; safe to call twice, and after the end."""
        self._cancel()

    def _taken(self, piece: Piece | GenerationError) -> Piece:
        if isinstance(piece, GenerationError):
            self._open = 0
            raise piece
        if piece.finish is not None:
            self._open -= 1
        return piece


# --- what an engine accepts: prompts, lengths, and how tokens are chosen ------------------------------------------


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
