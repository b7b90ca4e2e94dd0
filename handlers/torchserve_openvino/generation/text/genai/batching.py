"""The engine `genai`: one thread steps OpenVINO GenAI's pipeline while prompts run, and sleeps otherwise.

A prompt is admitted once the pages of its longest possible answer are free, in the order of arrival. So the pipeline
never runs out of pages, where it would drop sequences.

GenAI holds Python's lock during a step: other threads run between two steps.
"""

import contextlib
import itertools
import logging
import secrets
import threading
from collections import deque
from collections.abc import Sequence

from torchserve_openvino.errors import BusyError, GenerationError
from torchserve_openvino.generation.text.engine import Load, Sampling
from torchserve_openvino.generation.text.genai.pipeline import End, Pipeline
from torchserve_openvino.generation.text.genai.prompts import (
    EngineLimits,
    Live,
    Prompt,
    checked,
    end_all,
    open_choices,
    pass_on,
    stop,
)
from torchserve_openvino.generation.text.stream import PromptStream

logger = logging.getLogger(__name__)

_SEEDS = 2**32
# Steps that may pass until cancelled sequences are gone; one is enough in GenAI 2026.4.
_CLEARING_STEPS = 4


class GenAIEngine:
    """Generates with OpenVINO GenAI; implements `engine.Engine`.

    ``Piece.tokens`` includes the end-of-text token that ends a sequence. A prompt with ``n`` sequences runs as ``n``
    sequences with the seeds ``seed``, ``seed + 1`` and so on; without sampling they are equal, and run once.

    Args:
        pipeline: Used by this engine only.
        limits: What it accepts.
    """

    def __init__(self, pipeline: Pipeline, limits: EngineLimits) -> None:
        self._pipeline: Pipeline | None = pipeline
        self._limits = limits
        self._numbers = itertools.count()
        # Guards all below; notified when there is something to do.
        self._changed = threading.Condition()
        self._waiting: deque[Prompt] = deque()
        self._admitted: list[Prompt] = []
        self._running: list[Prompt] = []
        self._free_pages = limits.pages
        self._closing = False
        self._dead: str | None = None
        self._cache_usage = 0.0
        self._prompt_tokens = self._generated_tokens = 0
        self._thread = threading.Thread(target=self._work, name="text-generation", daemon=True)
        self._thread.start()

    @property
    def max_length(self) -> int:
        """Most tokens of one sequence, prompt and answer together."""
        return self._limits.max_length

    @property
    def dead(self) -> str | None:
        """Why the engine generates no more; None while it does."""
        return self._dead

    def load(self) -> Load:
        """Returns what it does now."""
        with self._changed:
            prompts = self._running + self._admitted
            return Load(
                running=sum(open_choices(prompt) for prompt in prompts),
                waiting=len(self._waiting),
                cache_usage=self._cache_usage if prompts else 0.0,
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated_tokens,
            )

    # --- callers' threads -----------------------------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> PromptStream:
        """Starts a prompt of at least one token.

        Raises:
            InvalidInputError: A token or a parameter is out of range, or prompt and answer are too long; the message
                has the numbers.
            BusyError: Too many prompts wait.
            GenerationError: The engine is closed, or dead.
        """
        made = checked(tuple(prompt), sampling, self._limits)
        made.stream = PromptStream(sampling.n, lambda: self._cancel(made))
        with self._changed:
            if self._closing or self._dead:
                raise GenerationError(self._dead or "the engine is closed.")
            if not self._waiting and made.pages <= self._free_pages:
                self._admit(made)
            elif len(self._waiting) < self._limits.max_waiting:
                self._waiting.append(made)
            else:
                raise BusyError(
                    f"{len(self._waiting)} prompts already wait for room in the cache (generate.max_waiting); try "
                    "again later."
                )
        return made.stream

    def _cancel(self, prompt: Prompt) -> None:
        with self._changed:
            prompt.cancelled = True
            if prompt in self._waiting:
                self._waiting.remove(prompt)
                end_all(prompt, "cancelled")
                self._admit_waiting()
            self._changed.notify()

    def close(self) -> None:
        """Ends all sequences as cancelled, and frees the model. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # --- under the lock -------------------------------------------------------------------------------------------

    def _admit(self, prompt: Prompt) -> None:
        self._free_pages -= prompt.pages
        self._admitted.append(prompt)
        self._prompt_tokens += len(prompt.tokens)
        self._changed.notify()

    def _admit_waiting(self) -> None:
        while self._waiting and self._waiting[0].pages <= self._free_pages:
            self._admit(self._waiting.popleft())

    def _release(self, prompts: list[Prompt]) -> None:
        self._free_pages += sum(prompt.pages for prompt in prompts)
        self._running = [prompt for prompt in self._running if prompt not in prompts]
        self._admit_waiting()

    # --- the engine's thread --------------------------------------------------------------------------------------

    def _work(self) -> None:
        assert self._pipeline is not None
        try:
            self._run(self._pipeline)
        except BaseException as error:
            # Nobody's stream may wait forever.
            self._dead = f"text generation stopped after an error: {_first_line(error)}"
            logger.exception("ERROR: %s", self._dead)
        finally:
            self._finish()

    def _run(self, pipeline: Pipeline) -> None:
        while not self._dead:
            with self._changed:
                while not (self._admitted or self._running or self._closing):
                    self._changed.wait()
                if self._closing:
                    break
                new, self._admitted = self._admitted, []
                self._running += new
            for prompt in new:
                self._start(pipeline, prompt)
            for prompt in self._running:
                if prompt.cancelled:
                    stop(prompt)
            try:
                pipeline.step()
            except RuntimeError as error:
                self._recover(pipeline, error)
            else:
                self._deliver(pipeline)

    def _start(self, pipeline: Pipeline, prompt: Prompt) -> None:
        if prompt.cancelled:
            return
        sampling = prompt.sampling
        first = sampling.seed if sampling.seed is not None else secrets.randbelow(_SEEDS)
        groups = [tuple(range(sampling.n))] if sampling.temperature == 0 else [(i,) for i in range(sampling.n)]
        try:
            for choices in groups:
                running = pipeline.add(
                    next(self._numbers), prompt.tokens, sampling, seed=(first + choices[0]) % _SEEDS,
                    eos=self._limits.eos,
                )  # fmt: skip
                prompt.live.append(Live(choices, running))
        except (RuntimeError, ValueError, TypeError) as error:
            stop(prompt)
            prompt.live.clear()
            logger.error("OpenVINO GenAI refused a prompt: %s", _first_line(error))
            self._fail([prompt], f"OpenVINO GenAI refused the prompt: {_first_line(error)}")

    def _deliver(self, pipeline: Pipeline) -> None:
        """Passes on what the last step brought."""
        usage = pipeline.cache_usage()
        generated = 0
        done: list[Prompt] = []
        for prompt in self._running:
            no_room = False
            for live in prompt.live:
                if not live.ended:
                    news = live.running.news()
                    generated += len(news.tokens) * len(live.choices)
                    no_room |= news.end is End.NO_ROOM
                    pass_on(prompt, live, news)
            if no_room:
                # Admission prevents it; a sequence must not hang if that is wrong.
                stop(prompt)
                prompt.stream.fail(GenerationError("the cache of keys and values is full."))
                done.append(prompt)
            elif prompt.cancelled or all(live.ended for live in prompt.live):
                end_all(prompt, "cancelled")
                done.append(prompt)
        with self._changed:
            self._cache_usage = usage
            self._generated_tokens += generated
            self._release(done)

    def _recover(self, pipeline: Pipeline, error: RuntimeError) -> None:
        """After a failed step: ends all sequences with an error, and finds out whether the pipeline still works."""
        reason = _first_line(error)
        logger.error("A step of text generation failed: %s", error)
        for prompt in self._running:
            for live in prompt.live:
                if not live.ended:
                    with contextlib.suppress(RuntimeError):
                        pass_on(prompt, live, live.running.news())
            stop(prompt)
        try:
            _clear(pipeline)
        except RuntimeError as again:
            self._dead = f"text generation stopped after an error: {reason}; then: {_first_line(again)}"
            logger.error("ERROR: %s", self._dead)
        self._fail(list(self._running), f"a step of generation failed: {reason}")

    def _fail(self, prompts: list[Prompt], reason: str) -> None:
        for prompt in prompts:
            if not prompt.live or not all(live.ended for live in prompt.live):
                prompt.stream.fail(GenerationError(reason))
        with self._changed:
            self._release(prompts)

    def _finish(self) -> None:
        """Ends everything that is left, and frees the model."""
        # GenAI complains of sequences that are left when it goes.
        for prompt in self._running:
            stop(prompt)
        with contextlib.suppress(RuntimeError):
            if self._pipeline is not None:
                _clear(self._pipeline)
        with self._changed:
            self._closing = True
            left = [*self._running, *self._admitted, *self._waiting]
            self._running, self._admitted = [], []
            self._waiting.clear()
            self._pipeline = None
        for prompt in left:
            if self._dead:
                prompt.stream.fail(GenerationError(self._dead))
            else:
                end_all(prompt, "cancelled")


def _clear(pipeline: Pipeline) -> None:
    """Makes the pipeline forget cancelled sequences. Raises RuntimeError if it can't."""
    for _ in range(_CLEARING_STEPS):
        if not pipeline.holds_sequences():
            return
        pipeline.step()
    raise RuntimeError("its sequences could not be ended")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "Exception from" not in line]
    return lines[0][:300] if lines else type(error).__name__
