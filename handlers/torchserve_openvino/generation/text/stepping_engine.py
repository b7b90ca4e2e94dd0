"""An engine that computes one step of one sequence after the other: the loop, the choice of tokens, limits and ends.

What a step is, its `Steps` say: eager PyTorch (`eager.py`), or compiled graphs (`compiled/`).
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchserve_openvino.errors import BusyError, GenerationError, ItemError, class_and_line
from torchserve_openvino.generation.text.engine import (
    DiesOnError,
    EngineLoad,
    Finish,
    GeneratedToken,
    Piece,
    PromptStream,
    Sampling,
    StepLimits,
    check_prompt,
)

logger = logging.getLogger(__name__)

# Changes logits before a token is chosen, given all tokens, how many were generated, and how many will be at most.
Rule = Callable[[Sequence[int], int, int, Tensor], Tensor]


class Work(Protocol):
    """What a model has computed for one sequence.

    Attributes:
        tokens: Tokens of the decoder; whoever chooses the next one adds it.
    """

    tokens: list[int]

    def advance(self) -> Tensor | None:
        """Computes a step.

        Returns:
            Logits after the last token, float32 ``[vocabulary]``; None if a long prompt takes further steps.
        """
        ...


class Steps(Protocol):
    """Begins sequences."""

    def begin(self, prompt: Sequence[int]) -> Work:
        """Returns a sequence for which nothing was computed yet.

        Raises:
            InvalidInputError: The model does not take the prompt.
        """
        ...


class _Sequence:
    """One sequence."""

    def __init__(
        self, choice: int, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling, stream: PromptStream
    ) -> None:
        self.choice, self.prompt, self.answer = choice, tuple(prompt), tuple(answer)
        self.sampling, self.stream = sampling, stream
        self.work: Work | None = None
        self.generated = 0
        self.cancelled = False
        self.draw = torch.Generator()
        if sampling.seed is None:
            self.draw.seed()
        else:
            self.draw.manual_seed((sampling.seed + choice) % 2**63)

    def step(self, steps: Steps, eos: frozenset[int], rule: Rule | None) -> Piece | None:
        """Computes a step; returns what it brought, None if it was a part of a long prompt."""
        if self.work is None:
            self.work = steps.begin(self.prompt)
            self.work.tokens += self.answer
        scores = self.work.advance()
        if scores is None:
            return None
        logits, how = scores.float(), self.sampling
        allowed = logits
        if rule is not None and not how.bare:
            allowed = rule(self.work.tokens, self.generated, how.max_tokens, logits)
        token = self._choose(self.work.tokens, allowed)
        self.work.tokens.append(token)
        self.generated += 1
        finish: Finish | None = None
        if token in eos and not how.ignore_eos:
            finish = "stop"
        elif self.generated == how.max_tokens:
            finish = "length"
        return Piece(self.choice, (listed(token, logits, how.logprobs),), finish)

    def _choose(self, tokens: Sequence[int], logits: Tensor) -> int:
        how = self.sampling
        if how.repetition_penalty != 1:
            logits = logits.clone()
            seen = torch.tensor(sorted(set(tokens)))
            some = logits[seen]
            logits[seen] = torch.where(some > 0, some / how.repetition_penalty, some * how.repetition_penalty)
        if how.temperature == 0:
            return int(logits.argmax())
        values, order = (logits / how.temperature).softmax(-1).sort(descending=True, stable=True)
        if how.top_k:
            values[how.top_k :] = 0
        # Of what top_k leaves, a token is kept if those before it do not reach top_p yet; so the first one always is.
        values = values * (values.cumsum(-1) - values < how.top_p * values.sum())
        return int(order[torch.multinomial(values, 1, generator=self.draw)])


def listed(token: int, logits: Tensor, most: int | None) -> GeneratedToken:
    """Returns a token with its log probability, and those of the ``most`` most probable ones; None gives neither."""
    if most is None:
        return GeneratedToken(token)
    all_of_them = logits.log_softmax(-1)
    values, order = all_of_them.topk(min(most, len(logits)))
    return GeneratedToken(token, float(all_of_them[token]), tuple(zip(order.tolist(), values.tolist(), strict=True)))


class SteppingEngine(DiesOnError):
    """Generates step by step; implements `engine.Engine`.

    Args:
        steps: What computes them; used by one thread at a time.
        limits: What it accepts.
        rule: What the model itself demands of its tokens; not applied to what is ``bare``.
    """

    def __init__(self, steps: Steps, limits: StepLimits, rule: Rule | None = None) -> None:
        super().__init__()
        self._steps: Steps | None = steps
        self._limits, self._rule = limits, rule
        # Guards all below; notified when there is something to do.
        self._changed = threading.Condition()
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._closing = False
        self._prompt_tokens = self._generated_tokens = 0
        self._thread = threading.Thread(target=self._work, name="text-generation", daemon=True)
        self._thread.start()

    @property
    def max_length(self) -> int:
        """Most tokens of one sequence, prompt and answer together."""
        return self._limits.max_length

    # --- callers' threads -----------------------------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> PromptStream:
        """Starts a prompt of at least one token.

        Raises:
            InvalidInputError: A token or a parameter is out of range, or prompt and answer are too long; the message
                has the numbers.
            BusyError: Too many sequences wait.
            GenerationError: The engine is closed, or dead.
        """
        return self.resume(prompt, (), sampling)

    def resume(self, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling) -> PromptStream:
        """As `submit`, for a prompt whose answer begins with given tokens; ``max_tokens`` counts those after them."""
        limits = self._limits
        check_prompt(prompt, len(answer), sampling, limits)
        sequences: list[_Sequence] = []
        stream = PromptStream(sampling.n, lambda: self._cancel(sequences))
        with self._changed:
            if self._closing or self._dead:
                raise GenerationError(self._dead or "the engine is closed.")
            if len(self._waiting) + sampling.n > limits.max_waiting + max(0, limits.running - len(self._running)):
                raise BusyError(f"{len(self._waiting)} sequences already wait (generate.max_waiting); try again later.")
            sequences += [_Sequence(choice, prompt, answer, sampling, stream) for choice in range(sampling.n)]
            self._waiting += sequences
            self._prompt_tokens += len(prompt)
            self._changed.notify()
        return stream

    def _cancel(self, sequences: list[_Sequence]) -> None:
        with self._changed:
            for sequence in sequences:
                sequence.cancelled = True
                if sequence in self._waiting:
                    self._waiting.remove(sequence)
                    sequence.stream.put(Piece(sequence.choice, finish="cancelled"))

    def load(self) -> EngineLoad:
        """Returns what it does now."""
        with self._changed:
            running = len(self._running)
            return EngineLoad(
                running, len(self._waiting), running / self._limits.running, self._prompt_tokens, self._generated_tokens
            )

    def close(self) -> None:
        """Ends all sequences as cancelled, and frees the model. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # --- the engine's thread --------------------------------------------------------------------------------------

    def _work(self) -> None:
        assert self._steps is not None
        try:
            while (running := self._next()) is not None:
                ended = [sequence for sequence in running if self._stepped(self._steps, sequence)]
                for sequence in ended:
                    # Whoever reads the rest of an answer holds the sequence, which has no use for its cache.
                    sequence.work = None
                with self._changed:
                    self._running = [sequence for sequence in self._running if sequence not in ended]
        except BaseException as error:
            # Nobody's stream may wait forever.
            dead = f"text generation stopped after an error: {_line(error)}"
            logger.exception("ERROR: %s", dead)
            self._finish(dead)
        else:
            self._finish(None)

    def _next(self) -> list[_Sequence] | None:
        """Waits for sequences to step; returns None at the end."""
        with self._changed:
            while not (self._running or self._waiting or self._closing):
                self._changed.wait()
            if self._closing:
                return None
            while self._waiting and len(self._running) < self._limits.running:
                self._running.append(self._waiting.popleft())
            return list(self._running)

    def _stepped(self, steps: Steps, sequence: _Sequence) -> bool:
        """Computes a step of a sequence; returns whether it has ended."""
        if sequence.cancelled or self._closing:
            sequence.stream.put(Piece(sequence.choice, finish="cancelled"))
            return True
        try:
            with torch.no_grad():
                piece = sequence.step(steps, self._limits.eos, self._rule)
        except ItemError as error:
            sequence.stream.fail(GenerationError(f"a step of generation failed: {error}"))
            return True
        except Exception as error:
            logger.exception("A step of text generation failed")
            sequence.stream.fail(GenerationError(f"a step of generation failed: {_line(error)}"))
            return True
        if piece is None:
            return False
        # Counted before anyone sees it.
        with self._changed:
            self._generated_tokens += 1
        sequence.stream.put(piece)
        return piece.finish is not None

    def _finish(self, dead: str | None) -> None:
        with self._changed:
            self._closing = True
            tell = self._die(dead) if dead else None
            left = [*self._running, *self._waiting]
            self._running = []
            self._waiting.clear()
            self._steps = None
        for sequence in left:
            sequence.work = None
            if dead:
                sequence.stream.fail(GenerationError(dead))
            else:
                sequence.stream.put(Piece(sequence.choice, finish="cancelled"))
        if tell is not None:
            tell()


def _line(error: BaseException) -> str:
    return class_and_line(error)[:300]
