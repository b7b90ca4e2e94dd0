"""What a worker and the process that generates for it tell each other: JSON, one message after the other."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from torchserve_openvino.generation.text.engine import Sampling


class End(Enum):
    """How a sequence ended. Its pages are free then."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    NO_ROOM = "no room"
    FAILED = "failed"


@dataclass(frozen=True)
class SequenceUpdate:
    """What a sequence got since it was last read.

    Attributes:
        number: The sequence.
        tokens: New tokens, in order.
        logprobs: Their natural log probabilities.
        end: How it ended; None if it goes on.
        reason: Of `End.FAILED`.
        guessed: How many of the tokens were guessed before they were computed.
    """

    number: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    end: End | None = None
    reason: str = ""
    guessed: int = 0


@dataclass(frozen=True)
class Update:
    """What a step brought.

    Attributes:
        news: Of the sequences that got something, or ended.
        usage: Share of the cache's pages in use, 0 to 1.
        hits: Tokens of prompts that were probably in the cache already, of all so far.
        dead: Why nothing will be generated any more; empty while it goes on.
    """

    news: tuple[SequenceUpdate, ...]
    usage: float = 0.0
    hits: int = 0
    dead: str = ""


@dataclass(frozen=True)
class Add:
    """Starts a sequence.

    Attributes:
        number: No other running sequence has it.
        prompt: Token ids, at least one.
        sampling: How its tokens are chosen; ``n`` and ``seed`` are not read.
        seed: For sampling, in 0..2^32-1.
    """

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True)
class Cancel:
    """Ends a sequence."""

    number: int


@dataclass(frozen=True)
class Close:
    """Ends the process."""


Command = Add | Cancel | Close


def command_bytes(command: Command) -> bytes:
    """Returns a command as bytes."""
    match command:
        case Add(number, prompt, sampling, seed):
            return _bytes([number, prompt, asdict(sampling), seed])
        case Cancel(number):
            return _bytes([number])
        case Close():
            return _bytes([])


def command_of(data: bytes) -> Command:
    """Returns the command that `command_bytes` wrote."""
    match json.loads(data):
        case [number, prompt, sampling, seed]:
            return Add(number, tuple(prompt), Sampling(**sampling), seed)
        case [number]:
            return Cancel(number)
        case _:
            return Close()


def update_bytes(update: Update) -> bytes:
    """Returns an update as bytes."""
    news = [[n.number, n.tokens, n.logprobs, n.end.value if n.end else None, n.reason, n.guessed] for n in update.news]
    return _bytes([news, update.usage, update.hits, update.dead])


def update_of(data: bytes) -> Update:
    """Returns the update that `update_bytes` wrote."""
    news, usage, hits, dead = json.loads(data)
    return Update(tuple(map(_news, news)), usage, hits, dead)


def _news(plain: Sequence[Any]) -> SequenceUpdate:
    number, tokens, logprobs, end, reason, guessed = plain
    return SequenceUpdate(number, tuple(tokens), tuple(logprobs), End(end) if end else None, reason, guessed)


def _bytes(plain: list[Any]) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode()
