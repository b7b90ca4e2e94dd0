"""The engine `genai`: admits prompts, and passes on what the process that generates says of them.

A prompt is admitted once the pages of its longest possible answer are free, in the order of arrival. So the pipeline
never runs out of pages, where it would drop sequences.
"""

import itertools
import logging
import queue
import secrets
import threading
from collections import deque
from collections.abc import Sequence

from torchserve_openvino.errors import BusyError, GenerationError
from torchserve_openvino.generation.text.engine import DiesOnError, EngineLoad, PromptStream, Sampling
from torchserve_openvino.generation.text.genai.child_process import Link
from torchserve_openvino.generation.text.genai.engine_messages import (
    Add,
    Cancel,
    Close,
    Command,
    End,
    SequenceUpdate,
    Update,
)
from torchserve_openvino.generation.text.genai.prompts import (
    AcceptedPrompt,
    EngineLimits,
    Live,
    checked,
    end_all,
    open_choices,
    pass_on,
)

logger = logging.getLogger(__name__)

_SEEDS = 2**32
# A long prompt's step; a process that takes longer to close is killed.
_CLOSE_SECONDS = 30.0


class GenAIEngine(DiesOnError):
    """Generates with OpenVINO GenAI in a process of its own; implements `engine.Engine`.

    ``Piece.tokens`` includes the end-of-text token that ends a sequence. A prompt with ``n`` sequences runs as ``n``
    sequences with the seeds ``seed``, ``seed + 1`` and so on; without sampling they are equal, and run once.

    Args:
        link: To the process, used by this engine only.
        limits: What it accepts.
    """

    def __init__(self, link: Link, limits: EngineLimits) -> None:
        super().__init__()
        self._link = link
        self._limits = limits
        self._numbers = itertools.count()
        # Commands are sent by a thread of their own: the process reads none during a step, and must not be waited for
        # by whoever has the lock, since that keeps its updates from being read.
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        # Guards all below.
        self._lock = threading.Lock()
        self._waiting: deque[AcceptedPrompt] = deque()
        self._running: list[AcceptedPrompt] = []
        self._live: dict[int, tuple[AcceptedPrompt, Live]] = {}
        self._free_pages, self._free_sequences = limits.pages, limits.sequences
        self._closing = False
        self._cache_usage = 0.0
        self._prompt_tokens = self._generated_tokens = self._guessed_tokens = self._prefix_hits = 0
        threading.Thread(target=self._send, name="text-generation-send", daemon=True).start()
        self._reader = threading.Thread(target=self._receive, name="text-generation", daemon=True)
        self._reader.start()

    @property
    def max_length(self) -> int:
        """Most tokens of one sequence, prompt and answer together."""
        return self._limits.max_length

    def load(self) -> EngineLoad:
        """Returns what it does now."""
        with self._lock:
            return EngineLoad(
                running=sum(open_choices(prompt) for prompt in self._running),
                waiting=len(self._waiting),
                cache_usage=self._cache_usage if self._running else 0.0,
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated_tokens,
                prefix_hits=self._prefix_hits,
                guessed_tokens=self._guessed_tokens,
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
        prompt_request = checked(tuple(prompt), sampling, self._limits)
        prompt_request.stream = PromptStream(sampling.n, lambda: self._cancel(prompt_request))
        with self._lock:
            if self._closing or self._dead:
                raise GenerationError(self._dead or "the engine is closed.")
            if not self._waiting and self._has_room(prompt_request):
                self._admit(prompt_request)
            elif len(self._waiting) < self._limits.max_waiting:
                self._waiting.append(prompt_request)
            else:
                raise BusyError(
                    f"{len(self._waiting)} prompts already wait for room in the cache (generate.max_waiting); try "
                    "again later."
                )
        return prompt_request.stream

    def _cancel(self, prompt: AcceptedPrompt) -> None:
        with self._lock:
            if prompt in self._waiting:
                self._waiting.remove(prompt)
                end_all(prompt, "cancelled")
                self._admit_waiting()
            else:
                self._stop(prompt)

    def close(self) -> None:
        """Ends all sequences as cancelled, and frees the model. Safe to call twice."""
        with self._lock:
            self._closing = True
        self._commands.put(Close())
        if self._reader is threading.current_thread():
            return
        self._reader.join(_CLOSE_SECONDS)
        if self._reader.is_alive():
            self._link.kill()
            self._reader.join()

    # --- under the lock -------------------------------------------------------------------------------------------

    def _has_room(self, prompt: AcceptedPrompt) -> bool:
        few = self._free_sequences is not None and self._free_sequences < prompt.sequences
        return prompt.pages <= self._free_pages and not few

    def _take_room(self, prompt: AcceptedPrompt, sign: int = 1) -> None:
        self._free_pages -= sign * prompt.pages
        if self._free_sequences is not None:
            self._free_sequences -= sign * prompt.sequences

    def _admit(self, prompt: AcceptedPrompt) -> None:
        self._take_room(prompt)
        self._running.append(prompt)
        self._prompt_tokens += len(prompt.tokens)
        sampling = prompt.sampling
        first = sampling.seed if sampling.seed is not None else secrets.randbelow(_SEEDS)
        groups = [tuple(range(sampling.n))] if sampling.temperature == 0 else [(i,) for i in range(sampling.n)]
        for choices in groups:
            live = Live(next(self._numbers), choices)
            prompt.live.append(live)
            self._live[live.number] = prompt, live
            self._commands.put(Add(live.number, prompt.tokens, sampling, (first + choices[0]) % _SEEDS))

    def _admit_waiting(self) -> None:
        while self._waiting and self._has_room(self._waiting[0]):
            self._admit(self._waiting.popleft())

    def _stop(self, prompt: AcceptedPrompt) -> None:
        for live in prompt.live:
            if not live.ended:
                self._commands.put(Cancel(live.number))

    def _take(self, news: SequenceUpdate) -> None:
        """Passes on what a sequence got; frees the pages of a prompt whose sequences have all ended."""
        prompt, live = self._live[news.number]
        self._generated_tokens += len(news.tokens) * len(live.choices)
        self._guessed_tokens += news.guessed * len(live.choices)
        pass_on(prompt, live, news)
        if news.end is None:
            return
        del self._live[news.number]
        if news.end in {End.FAILED, End.NO_ROOM}:
            if news.end is End.NO_ROOM:
                logger.error("The cache of keys and values is full, although room was kept for this prompt")
            # One error ends the whole prompt.
            self._stop(prompt)
        if all(live.ended for live in prompt.live):
            self._take_room(prompt, -1)
            self._running.remove(prompt)
            self._admit_waiting()

    # --- the engine's threads -------------------------------------------------------------------------------------

    def _send(self) -> None:
        while True:
            command = self._commands.get()
            if not self._link.send(command) or isinstance(command, Close):
                return

    def _receive(self) -> None:
        reason = ""
        try:
            while not reason and (update := self._link.receive()) is not None:
                self._deliver(update)
                reason = update.dead
        except Exception as error:
            # Nobody's stream may wait forever.
            logger.exception("ERROR: an update of text generation could not be read")
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._finish(reason)

    def _deliver(self, update: Update) -> None:
        for news in update.news:
            if news.end is End.FAILED:
                logger.error("A prompt failed: %s", news.reason)
        with self._lock:
            self._cache_usage, self._prefix_hits = update.usage, update.hits
            for news in update.news:
                self._take(news)

    def _finish(self, reason: str) -> None:
        """Ends everything that is left once the process is gone."""
        if reason:
            # It may hang instead of ending.
            self._link.kill()
        ended = self._link.ended()
        with self._lock:
            tell = None
            if not self._closing:
                tell = self._die(f"text generation stopped after an error: {reason or ended}")
            self._closing = True
            left = [*self._running, *self._waiting]
            self._running, self._live = [], {}
            self._waiting.clear()
        for prompt in left:
            if self._dead:
                prompt.stream.fail(GenerationError(self._dead))
            else:
                end_all(prompt, "cancelled")
        # The thread that sends may wait for commands.
        self._commands.put(Close())
        if tell is not None:
            logger.error("ERROR: %s", self._dead)
            tell()
