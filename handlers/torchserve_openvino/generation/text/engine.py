"""The interface of an engine: it takes prompts as tokens, and gives back tokens as they are generated."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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


@dataclass(frozen=True)
class Token:
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
    tokens: tuple[Token, ...] = ()
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
class Load:
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

    def load(self) -> Load:
        """Returns what it does now."""
        ...

    def close(self) -> None:
        """Ends all sequences, and frees the model."""
        ...
