"""One request while it is answered: its sequences in the engine, and what became of them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torchserve_openvino.errors import GenerationError, ItemError
from torchserve_openvino.generation.text.engine import Engine, Piece, Sampling, Stream
from torchserve_openvino.serving.requests.isolation import server_fault
from torchserve_openvino.tasks.generation.detokenizer import Delta, PlacedToken, TextWriter
from torchserve_openvino.tasks.generation.reading import GenerationRequest, Prompt, RequestReader

# Between looks at several sequences, of which any may have something new.
_LOOK_SECONDS = 0.004
# Tokens of a prompt that give its answer's first one a context.
_CONTEXT = 5


@dataclass
class Choice:
    """One answer.

    Attributes:
        index: Its number in the request.
        prompt: Its prompt's number.
        stream: Its sequence in the engine.
        writer: Writes its text.
        before: What its text begins with, for ``echo``.
        tokens: Tokens generated.
        finish: Why it ended, ``stop`` or ``length``; None if it goes on.
        reported: Whether `ActiveRequest.deltas` has reported that.
        started: When it was submitted, in seconds.
        first: When its first token came.
        last: When its last one came.
    """

    index: int
    prompt: int
    stream: Stream
    writer: TextWriter
    before: str = ""
    tokens: int = 0
    finish: str | None = None
    reported: bool = False
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0
    # Everything that was taken from the writer, for an answer in one piece.
    text: str = ""
    listed: list[PlacedToken] = field(default_factory=list)

    def take(self) -> Delta:
        """Returns what is new since the last call; the first time with the echo."""
        piece = self.writer.take()
        delta = Delta(self.before + piece.text, piece.tokens)
        self.before = ""
        self.text += delta.text
        self.listed += delta.tokens
        return delta

    def accept(self, piece: Piece) -> None:
        """Takes a piece from the engine; ends the sequence if its text holds a stop text."""
        now = time.perf_counter()
        for token in piece.tokens:
            self.first = self.first or now
            self.last = now
            self.tokens += 1
            if not self.writer.add(token):
                self.stream.cancel()
                self.end("stop")
                return
        if piece.finish == "cancelled":
            raise GenerationError("the engine ended this answer before it was complete; ask again")
        if piece.finish is not None:
            self.end(piece.finish)

    def end(self, finish: str) -> None:
        """Says why it ended."""
        self.writer.end()
        self.finish = finish


class ActiveRequest:
    """Generates what one request asks.

    Each answer is a sequence of its own in the engine, so that a stop text in one leaves the others alone, and the
    seed of the answer number k is the request's seed plus k.

    Args:
        request: The request.
        engine: Generates tokens.
        reader: Knows the texts of tokens.
        continues: Whether answers go on with the text of their prompts, as without an encoder.
        special: Tokens that are no text.

    Raises:
        ItemError: The engine does not take the request; nothing of it runs on.
    """

    def __init__(
        self, request: GenerationRequest, engine: Engine, reader: RequestReader, *, continues: bool,
        special: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.request = request
        self.refused: dict[int, ItemError] = {}
        self.choices: list[Choice] = []
        self.error: ItemError | None = None
        text_of = reader.text_of if request.logprobs is not None else None
        for number, prompt in enumerate(request.prompts):
            if isinstance(prompt, ItemError):
                self.refused[number] = prompt
                continue
            try:
                for copy in range(request.n):
                    started = time.perf_counter()
                    before = prompt.tokens[-_CONTEXT:] if continues else ()
                    writer = TextWriter(reader.decode, request.stops, before, text_of=text_of, special=special)
                    stream = engine.submit(prompt.tokens, _own_seed(prompt, copy))
                    choice = Choice(number * request.n + copy, number, stream, writer, started=started)
                    choice.before = prompt.text if request.echo else ""
                    self.choices.append(choice)
            except ItemError as error:
                self._refuse(number, error)
                if self.error is not None:
                    raise
            except Exception:
                self.cancel()
                raise

    # --- progress ---------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or all(choice.finish is not None for choice in self.choices)

    def poll(self, seconds: float) -> bool:
        """Takes what the engine has for this request; waits for something up to some seconds.

        Returns:
            Whether there was something.
        """
        until = time.perf_counter() + seconds
        while not self.done:
            going = self._going()
            # A single sequence can be waited for; of several, any may be the next.
            wait = max(0.0, until - time.perf_counter())
            wait = wait if len(going) == 1 else min(wait, _LOOK_SECONDS)
            changes = [self._next(choice, wait if number == 0 else 0.0) for number, choice in enumerate(going)]
            if any(changes):
                return True
            if time.perf_counter() >= until:
                return False
        return True

    def _going(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.finish is None]

    def _next(self, choice: Choice, seconds: float) -> bool:
        if choice.finish is not None or self.error is not None:
            return False
        try:
            piece = choice.stream.next(seconds)
            if piece is None:
                return False
            # What is there already is sent together.
            while piece is not None and choice.finish is None:
                choice.accept(piece)
                piece = choice.stream.next(0.0) if choice.finish is None else None
            return True
        except StopIteration:
            self._refuse(choice.prompt, GenerationError("the engine ended this answer without a reason"))
        except ItemError as error:
            self._refuse(choice.prompt, error)
        except Exception as error:
            # Other requests go on, whatever is wrong with this one.
            self._refuse(choice.prompt, server_fault(error))
        return True

    def _refuse(self, number: int, error: ItemError) -> None:
        """Ends the answers to one prompt of a plain list; of any other request, all."""
        if self.request.many:
            self.refused[number] = error
            ended = [choice for choice in self.choices if choice.prompt == number]
        else:
            self.error = error
            ended = self.choices
        for choice in ended:
            choice.stream.cancel()
        self.choices = [choice for choice in self.choices if choice not in ended]

    def cancel(self) -> None:
        """Ends what still runs."""
        for choice in self._going():
            choice.stream.cancel()

    # --- results ----------------------------------------------------------------------------------------------

    def deltas(self) -> Iterator[tuple[Choice, Delta]]:
        """Yields what is new, and each end of an answer once."""
        for choice in self.choices:
            if choice.reported:
                continue
            delta = choice.take()
            choice.reported = ended = choice.finish is not None
            if delta.text or delta.tokens or ended:
                yield choice, delta

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts that were answered, each counted once."""
        return sum(len(prompt.tokens) for prompt in self._prompts())

    @property
    def generated_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(choice.tokens for choice in self.choices)

    def _prompts(self) -> Sequence[Prompt]:
        return [prompt for prompt in self.request.prompts if isinstance(prompt, Prompt)]


def _own_seed(prompt: Prompt, copy: int) -> Sampling:
    """Returns how the answer number ``copy`` to a prompt is chosen."""
    sampling = replace(prompt.sampling, n=1)
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + copy) % 2**63)


def wait_for_any(exchanges: Sequence[ActiveRequest], seconds: float) -> None:
    """Takes what the engine has for any of several requests; waits for something up to some seconds."""
    until = time.perf_counter() + seconds
    while going := [exchange for exchange in exchanges if not exchange.done]:
        alone = len(going) == 1
        changes = [
            sequence.poll((seconds if alone else _LOOK_SECONDS) if n == 0 else 0.0) for n, sequence in enumerate(going)
        ]
        if any(changes) or time.perf_counter() >= until:
            return
