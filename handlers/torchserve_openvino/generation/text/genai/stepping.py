"""Steps a pipeline while sequences run, and says what each step brought; the only loop of the generating process."""

import contextlib
import logging
from multiprocessing.connection import Connection

from torchserve_openvino.generation.text.genai.messages import (
    Add,
    Cancel,
    Close,
    Command,
    End,
    News,
    Update,
    command_of,
    update_bytes,
)
from torchserve_openvino.generation.text.genai.pipeline import Pipeline, Running

logger = logging.getLogger(__name__)

# Steps that may pass until cancelled sequences are gone; one is enough in GenAI 2026.4.
_CLEARING_STEPS = 4


class Stepper:
    """The sequences of a pipeline.

    Args:
        pipeline: Used by this object only.
        eos: Tokens that end a sequence.
    """

    def __init__(self, pipeline: Pipeline, eos: frozenset[int]) -> None:
        self._pipeline, self._eos = pipeline, eos
        self._running: dict[int, Running] = {}
        self._cancelled: set[int] = set()
        # What is known before the next step.
        self._refused: list[News] = []

    @property
    def busy(self) -> bool:
        """Whether there is something to do or to say."""
        return bool(self._running or self._refused)

    def take(self, command: Command) -> None:
        """Starts or ends a sequence; both take effect in the next step."""
        match command:
            case Add(number, prompt, sampling, seed):
                try:
                    self._running[number] = self._pipeline.add(number, prompt, sampling, seed=seed, eos=self._eos)
                except (RuntimeError, ValueError, TypeError) as error:
                    reason = f"OpenVINO GenAI refused the prompt: {first_line(error)}"
                    self._refused.append(News(number, end=End.FAILED, reason=reason))
            case Cancel(number) if number in self._running:
                self._running[number].cancel()
                self._cancelled.add(number)

    def step(self) -> Update:
        """Computes the next tokens of all sequences, or a part of a long prompt; returns what is new."""
        news, self._refused = self._refused, []
        if not self._running:
            return Update(tuple(news))
        try:
            self._pipeline.step()
        except RuntimeError as error:
            failed, dead = self.fail(f"a step of generation failed: {first_line(error)}")
            return Update((*news, *failed), dead=dead)
        news += [one for running in list(self._running.values()) if (one := self._read(running)) is not None]
        return Update(tuple(news), self._pipeline.cache_usage() if self._running else 0.0)

    def _read(self, running: Running) -> News | None:
        found = running.news()
        # GenAI calls a sequence that is cancelled before its first step one without room.
        if found.end in {None, End.NO_ROOM} and found.number in self._cancelled:
            found = News(found.number, found.tokens, found.logprobs, End.CANCELLED)
        if found.end is End.NO_ROOM:
            running.cancel()
        if found.end is not None:
            del self._running[found.number]
            self._cancelled.discard(found.number)
        return found if found.tokens or found.end is not None else None

    def fail(self, reason: str) -> tuple[list[News], str]:
        """Ends all sequences with an error, and finds out whether the pipeline still works.

        Returns:
            What is new of them, and why the pipeline does not work any more; empty if it does.
        """
        ended = []
        for number, running in self._running.items():
            last = News(number)
            with contextlib.suppress(RuntimeError):
                last = running.news()
            # A sequence that ended in an earlier part of the step that failed has its whole answer.
            kept = last.end in {End.STOP, End.LENGTH}
            ended.append(last if kept else News(number, last.tokens, last.logprobs, End.FAILED, reason))
        dead = ""
        try:
            self.clear()
        except RuntimeError as again:
            dead = f"{reason}; then: {first_line(again)}"
        return ended, dead

    def clear(self) -> None:
        """Makes the pipeline forget its sequences. Raises RuntimeError if it can't."""
        for running in self._running.values():
            running.cancel()
        self._running.clear()
        self._cancelled.clear()
        for _ in range(_CLEARING_STEPS):
            if not self._pipeline.holds_sequences():
                return
            self._pipeline.step()
        raise RuntimeError("its sequences could not be ended")


def serve(pipeline: Pipeline, eos: frozenset[int], connection: Connection) -> None:
    """Generates until the other end asks to close, or is gone.

    Args:
        pipeline: Used by this function only.
        eos: Tokens that end a sequence.
        connection: Gets commands, and gives an update after each step.
    """
    stepper = Stepper(pipeline, eos)
    try:
        while True:
            # Without sequences there is nothing to do until a command comes.
            while connection.poll(0.0 if stepper.busy else None):
                command = command_of(connection.recv_bytes())
                if isinstance(command, Close):
                    return
                stepper.take(command)
            update = stepper.step()
            connection.send_bytes(update_bytes(update))
            if update.dead:
                return
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The worker is gone, and with it all who wait.
        return
    except Exception as error:
        news, _ = stepper.fail(reason := f"{type(error).__name__}: {first_line(error)}")
        logger.exception("Text generation stopped after an error")
        connection.send_bytes(update_bytes(Update(tuple(news), dead=reason)))
    finally:
        # GenAI complains of sequences that are left when it goes.
        with contextlib.suppress(RuntimeError):
            stepper.clear()


def first_line(error: BaseException) -> str:
    """Returns the line of an error's text that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "Exception from" not in line]
    return lines[0][:300] if lines else type(error).__name__
