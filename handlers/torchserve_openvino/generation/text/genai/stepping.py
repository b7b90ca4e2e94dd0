"""Steps a pipeline while sequences run, and says what each step brought; the only loop of the generating process."""

import contextlib
import logging
import select
import time
from collections import deque
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from torchserve_openvino.errors import class_and_line, first_line
from torchserve_openvino.generation.text.genai.engine_messages import (
    Add,
    Cancel,
    Close,
    Command,
    End,
    SequenceUpdate,
    Update,
    command_of,
    update_bytes,
)
from torchserve_openvino.generation.text.genai.long_prompts import LongPrompts, Pages, SharedPrefixes, hashes_of
from torchserve_openvino.generation.text.genai.pipeline import Pipeline, Running

logger = logging.getLogger(__name__)

# Steps that may pass until cancelled sequences are gone; one is enough in GenAI 2026.4.
_CLEARING_STEPS = 4
# Small models take a step in 1 to 3 ms; a worker that is told of each takes a core from the next step for another
# millisecond. Nobody who reads a stream sees 20 ms.
_READ_SECONDS = 0.02


@dataclass
class _Live:
    """A sequence in the pipeline.

    Attributes:
        add: How it began.
        running: Its handle.
        begun: Whether it may have taken part in a step.
        tokens: What it generated.
        cancelled: Whether it is to end.
    """

    add: Add
    running: Running
    begun: bool = False
    tokens: list[int] = field(default_factory=list)
    cancelled: bool = False


@dataclass(frozen=True)
class _Waiting:
    """A prompt that is to be computed.

    Attributes:
        add: The prompt.
        hashes: Of its beginnings.
        is_rest: Whether parts of it were computed, and its hits counted.
    """

    add: Add
    hashes: list[int]
    is_rest: bool = False


class Stepper:
    """The sequences of a pipeline.

    With the cache of prefixes, a prompt is never dropped while it is computed: GenAI 2026.4 finds the page that it has
    half computed again as if it were whole. Some prompts wait for each other, see `beginnings.py`.

    Args:
        pipeline: Used by this object only.
        eos: Tokens that end a sequence.
    """

    def __init__(self, pipeline: Pipeline, eos: frozenset[int]) -> None:
        self._pipeline, self._eos = pipeline, eos
        self._keeps_pages = pipeline.settings.prefix_caching
        pages = pipeline.settings.pages if self._keeps_pages else 0
        self._pages, self._beginnings = Pages(pages), SharedPrefixes(pages)
        self._long = LongPrompts(pipeline, self._pages, self._beginnings)
        # In the order of arrival.
        self._waiting: deque[_Waiting] = deque()
        self._live: dict[int, _Live] = {}
        # What is known, and not told yet; what does not depend on a step is known before it.
        self._known: list[SequenceUpdate] = []
        self._dead = ""
        self._hits = 0

    @property
    def busy(self) -> bool:
        """Whether there is something to do or to say."""
        return bool(self._live or self._waiting or self._known or self._long)

    @property
    def has_prompts(self) -> bool:
        """Whether the next step may be a long one."""
        return bool(self._long or self._waiting) or self._prompts_run

    @property
    def _prompts_run(self) -> bool:
        return any(not live.tokens for live in self._live.values())

    @property
    def is_due(self) -> bool:
        """Whether there may be more to tell than further tokens: first ones, errors, or that all have ended."""
        return bool(self._known or self._dead) or self.has_prompts or not self._pipeline.holds_sequences()

    def take(self, command: Command) -> None:
        """Starts or ends a sequence; both take effect in the next step."""
        match command:
            case Add():
                if self._long.takes(command):
                    self._count_hits(command)
                else:
                    self._waiting.append(_Waiting(command, hashes_of(command.prompt)))
            case Cancel(number) if number in self._live:
                live = self._live[number]
                live.cancelled = True
                if not (self._keeps_pages and live.begun and not live.tokens):
                    live.running.cancel()
            case Cancel(number) if self._long.cancel(number) or self._forget_waiting(number):
                self._known.append(SequenceUpdate(number, end=End.CANCELLED))

    def _forget_waiting(self, number: int) -> bool:
        waiting = next((item for item in self._waiting if item.add.number == number), None)
        if waiting is not None:
            self._waiting.remove(waiting)
        return waiting is not None

    def _count_hits(self, add: Add) -> None:
        # The last token is always computed, since the next one depends on it.
        self._hits += min(self._pages.tokens_of(add.prompt), len(add.prompt) - 1)

    def _start_waiting(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, deque()
        # What the next step computes at most before a prompt's turn comes.
        before = self._long.size + sum(1 if live.tokens else len(live.add.prompt) for live in self._live.values())
        for item in waiting:
            whole = before + len(item.add.prompt)
            if self._beginnings.may_begin(item.hashes, fits=whole <= self._pipeline.settings.step_tokens):
                self._start(item)
                before = whole
            else:
                self._waiting.append(item)

    def _start(self, waiting: _Waiting) -> None:
        add = waiting.add
        if not waiting.is_rest:
            self._count_hits(add)
        try:
            running = self._pipeline.add(add.number, add.prompt, add.sampling, seed=add.seed, eos=self._eos)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = f"OpenVINO GenAI refused the prompt: {first_line(error)}"
            self._known.append(SequenceUpdate(add.number, end=End.FAILED, reason=reason))
        else:
            self._live[add.number] = _Live(add, running)
            self._beginnings.begin(add.number, waiting.hashes)

    def step(self) -> None:
        """Computes the next tokens of all sequences, or a part of a long prompt; `read` returns what that brought."""
        if (ready := self._long.before_step(self._prompts_run or bool(self._waiting))) is not None:
            self._waiting.append(_Waiting(ready, hashes_of(ready.prompt), is_rest=True))
        self._start_waiting()
        try:
            if self._live or self._long:
                self._pipeline.step()
            ended = self._long.after_step()
        except RuntimeError as error:
            failed, self._dead = self.fail(f"a step of generation failed: {first_line(error)}")
            self._known += failed
        else:
            if ended is not None:
                self._known.append(SequenceUpdate(ended.number, end=End.CANCELLED))

    def read(self) -> Update:
        """Returns what is new since it was last called."""
        news, self._known = self._known, []
        news += [one for live in list(self._live.values()) if (one := self._read(live)) is not None]
        if self._keeps_pages and any(one.end is End.NO_ROOM for one in news):
            failed, self._dead = self.fail("the cache of keys and values is full, although room was kept")
            news += failed
        return Update(tuple(news), self._pipeline.cache_usage() if self._live else 0.0, self._hits, self._dead)

    def _read(self, live: _Live) -> SequenceUpdate | None:
        live.begun = True
        update = live.running.news()
        if update.tokens and not live.tokens:
            self._beginnings.end(live.add.number)
            self._pages.learn(live.add.prompt)
        live.tokens += update.tokens
        # GenAI calls a sequence that is cancelled before its first step one without room.
        if update.end in {None, End.NO_ROOM} and live.running.cancelled:
            update = replace(update, end=End.CANCELLED)
        if update.end is End.NO_ROOM or (update.end is None and live.cancelled and live.tokens):
            live.running.cancel()
        if update.end is not None:
            self._forget(live)
        return update if update.tokens or update.end is not None else None

    def _forget(self, live: _Live) -> None:
        del self._live[live.add.number]
        self._beginnings.end(live.add.number)
        if live.tokens:
            # The last token is given, not computed.
            self._pages.learn((*live.add.prompt, *live.tokens[:-1]))

    def fail(self, reason: str) -> tuple[list[SequenceUpdate], str]:
        """Ends all sequences with an error, and finds out whether the pipeline still works.

        Returns:
            What is new of them, and why the pipeline does not work any more; empty if it does.
        """
        ended = []
        for number, live in self._live.items():
            last = SequenceUpdate(number)
            with contextlib.suppress(RuntimeError):
                last = live.running.news()
            # A sequence that ended in an earlier part of the step that failed has its whole answer.
            reusable = last.end in {End.STOP, End.LENGTH}
            ended.append(last if reusable else replace(last, end=End.FAILED, reason=reason))
        never_ran = [*self._long.clear(), *(item.add for item in self._waiting)]
        ended += [SequenceUpdate(add.number, end=End.FAILED, reason=reason) for add in never_ran]
        dead = f"{reason}; the pages of its cache are not to be trusted" if self._keeps_pages else ""
        try:
            self.clear()
        except RuntimeError as again:
            dead = f"{reason}; then: {first_line(again)}"
        return ended, dead

    def clear(self) -> None:
        """Makes the pipeline forget its sequences. Raises RuntimeError if it can't."""
        for live in self._live.values():
            live.running.cancel()
        self._live.clear()
        self._waiting.clear()
        self._long.clear()
        self._beginnings.clear()
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
        connection: Gets commands, and gives updates of what the steps brought.
    """
    stepper = Stepper(pipeline, eos)
    commands = select.poll()
    commands.register(connection, select.POLLIN)
    sent, unread = 0.0, False
    try:
        while True:
            # Without sequences there is nothing to do until a command comes.
            while commands.poll(0 if stepper.busy else None):
                command = command_of(connection.recv_bytes())
                if isinstance(command, Close):
                    return
                stepper.take(command)
            if unread and stepper.has_prompts:
                connection.send_bytes(update_bytes(stepper.read()))
            began = time.monotonic()
            stepper.step()
            now = time.monotonic()
            after_next_step = now + (now - began)
            unread = after_next_step - sent < _READ_SECONDS and not stepper.is_due
            if unread:
                continue
            update = stepper.read()
            connection.send_bytes(update_bytes(update))
            sent = now
            if update.dead:
                return
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The worker is gone, and with it all who wait.
        return
    except Exception as error:
        news, _ = stepper.fail(reason := class_and_line(error))
        logger.exception("Text generation stopped after an error")
        connection.send_bytes(update_bytes(Update(tuple(news), dead=reason)))
    finally:
        # GenAI complains of sequences that are left when it goes.
        with contextlib.suppress(RuntimeError):
            stepper.clear()
