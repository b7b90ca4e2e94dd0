"""From tokens to text, piece by piece: no half characters, and nothing of a stop text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchserve_openvino.generation.text.engine import GeneratedToken

Decode = Callable[[list[int]], str]

# What a decoder makes of bytes that are no character, or not one yet.
_BROKEN = "\ufffd"
# Tokens after which such bytes are taken for what they are: a character has four bytes at most.
_PATIENCE = 64


class Detokenizer:
    """Decodes tokens as they come.

    A token may hold a part of a character, and its text may depend on the token before it (a leading space). So some
    tokens before it are decoded again with each new one, and what is new in that text is the new piece.

    Args:
        decode: Returns the text of tokens, without special ones.
        before: Tokens before the first one: some decoders drop a space at the beginning of a text.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(before)
        # Up to `_known`, tokens are written out; those from `_start` on give them their context.
        self._start, self._known = 0, len(before)
        # Characters of the open tokens that are written out.
        self._written = 0

    def add(self, token: int) -> str:
        """Takes a token; returns the text that is certain now, which may be empty."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._start : self._known])
        text = self._decode(self._tokens[self._start :])
        waits = text.endswith(_BROKEN) and len(self._tokens) - self._known < _PATIENCE
        # Broken characters at the end can still become whole ones: several where a decoder makes one of each byte.
        end = len(text.rstrip(_BROKEN)) if waits else len(text)
        begin = len(before) + self._written
        piece = text[begin:end] if end > begin else ""
        self._written += len(piece)
        open_tokens = len(self._tokens) - self._known
        if not waits and (len(text) > len(before) or open_tokens >= _PATIENCE):
            self._start, self._known, self._written = self._known, len(self._tokens), 0
        return piece


@dataclass(frozen=True)
class PlacedToken:
    """A token and where its text begins.

    Attributes:
        token: The token.
        offset: Characters of the answer before it.
        text: Its own text; a broken character if it holds a part of one.
    """

    token: GeneratedToken
    offset: int
    text: str


@dataclass(frozen=True)
class Delta:
    """What is new in an answer."""

    text: str = ""
    tokens: tuple[PlacedToken, ...] = ()


class TextWriter:
    """Writes the text of one sequence, up to a stop text.

    Args:
        decode: Returns the text of tokens, without special ones.
        stops: Texts that end the answer.
        before: Tokens before the first one.
        text_of: Returns the text of one token, for a list of them beside the text; None if there is none.
        special: Tokens that are no text; those at the end of an answer are not listed.
    """

    def __init__(
        self, decode: Decode, stops: Sequence[str], before: Sequence[int] = (), *,
        text_of: Callable[[int], str] | None = None, special: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self._detokenizer = Detokenizer(decode, before)
        self._stops, self._text_of, self._special = tuple(stops), text_of, special
        self._longest = max(map(len, self._stops), default=1)
        self._waiting: list[PlacedToken] = []
        self._taken = 0
        self._ended = False
        self.text = ""
        self.stopped = False

    def add(self, token: GeneratedToken) -> bool:
        """Takes a token; returns whether the answer goes on, which it does not after a stop text."""
        if self.stopped:
            return False
        before = len(self.text)
        piece = self._detokenizer.add(token.id)
        if self._text_of is not None:
            self._waiting.append(PlacedToken(token, before, self._text_of(token.id)))
        if not piece:
            return True
        self.text += piece
        stops = [start for stop in self._stops if (start := self.text.find(stop, max(0, before - self._longest))) >= 0]
        if stops:
            self.text, self.stopped = self.text[: min(stops)], True
        return not self.stopped

    def end(self) -> None:
        """Says that no token follows: what waited for a stop text to go on is text."""
        self._ended = True

    def take(self) -> Delta:
        """Returns what is new and certain since the last call."""
        final = self._ended or self.stopped
        end = len(self.text) - (0 if final else self._held())
        text, self._taken = self.text[self._taken : end], max(end, self._taken)
        return Delta(text, tuple(self._tokens_before(end, final)))

    def _tokens_before(self, end: int, final: bool) -> list[PlacedToken]:
        ready = [item for item in self._waiting if item.offset < end or (final and not self.stopped)]
        self._waiting = self._waiting[len(ready) :]
        if final:
            self._waiting = []
            while ready and ready[-1].token.id in self._special:
                ready.pop()
        return ready

    def _held(self) -> int:
        """Returns how many characters at the end may be the beginning of a stop text."""
        most = min(self._longest - 1, len(self.text))
        for count in range(most, 0, -1):
            tail = self.text[-count:]
            if any(stop.startswith(tail) for stop in self._stops):
                return count
        return 0
