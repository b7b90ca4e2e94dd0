"""The stream of one prompt: the engine's thread puts pieces in, any other thread takes them out."""

import queue
from collections.abc import Callable, Iterator

from torchserve_openvino.errors import GenerationError
from torchserve_openvino.generation.text.engine import Piece


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
