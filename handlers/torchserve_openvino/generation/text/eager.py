"""The engine without OpenVINO: the model in eager PyTorch, one step of one sequence after the other.

It serves `pt2.compile.enable: false`, to compare with and to look for faults; it is not made to be fast.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torchserve_openvino.errors import BusyError, GenerationError, InvalidInputError
from torchserve_openvino.generation.text.engine import Finish, Load, Piece, Sampling, Token
from torchserve_openvino.generation.text.exporting.export import cache_argument
from torchserve_openvino.generation.text.stream import PromptStream

logger = logging.getLogger(__name__)

_MOST_RUNNING = 8


class _Sequence:
    """One sequence, with what the model has computed for it."""

    def __init__(self, choice: int, prompt: Sequence[int], sampling: Sampling, stream: PromptStream) -> None:
        self.choice, self.sampling, self.stream = choice, sampling, stream
        self.tokens = list(prompt)
        self.fed = 0
        self.generated = 0
        self.past: dict[str, Any] = {}
        self.cancelled = False
        self.draw = torch.Generator()
        if sampling.seed is None:
            self.draw.seed()
        else:
            self.draw.manual_seed((sampling.seed + choice) % 2**63)

    def step(self, model: Any, eos: frozenset[int]) -> Finish | None:
        """Generates one token; returns why the sequence ends, None if it goes on."""
        ids = torch.tensor([self.tokens[self.fed :]])
        if not self.past:
            self.past = _empty_cache(model)
        # The cache is an object that the model adds to.
        found = model(input_ids=ids, use_cache=True, **self.past)
        self.fed = len(self.tokens)
        logits = found.logits[0, -1].float()
        token = self._choose(logits)
        self.tokens.append(token)
        self.generated += 1
        finish: Finish | None = None
        if token in eos and not self.sampling.ignore_eos:
            finish = "stop"
        elif self.generated == self.sampling.max_tokens:
            finish = "length"
        self.stream.put(Piece(self.choice, (self._listed(token, logits),), finish))
        return finish

    def _choose(self, logits: torch.Tensor) -> int:
        how = self.sampling
        if how.repetition_penalty != 1:
            logits = logits.clone()
            seen = torch.tensor(sorted(set(self.tokens)))
            some = logits[seen]
            logits[seen] = torch.where(some > 0, some / how.repetition_penalty, some * how.repetition_penalty)
        if how.temperature == 0:
            return int(logits.argmax())
        values, order = (logits / how.temperature).softmax(-1).sort(descending=True, stable=True)
        # A token is kept if those before it do not reach top_p yet; so the first one always is.
        kept = values.cumsum(-1) - values < how.top_p
        if how.top_k:
            kept[how.top_k :] = False
        values = values * kept
        return int(order[torch.multinomial(values, 1, generator=self.draw)])

    def _listed(self, token: int, logits: torch.Tensor) -> Token:
        most = self.sampling.logprobs
        if most is None:
            return Token(token)
        all_of_them = logits.log_softmax(-1)
        values, order = all_of_them.topk(min(most, len(logits)))
        return Token(token, float(all_of_them[token]), tuple(zip(order.tolist(), values.tolist(), strict=True)))


def _empty_cache(model: Any) -> dict[str, Any]:
    """Returns the argument that caches keys and values; its name depends on the version of transformers."""
    # Imported here: it takes seconds, which only workers of models of transformers need.
    from transformers import DynamicCache

    return {cache_argument(model): DynamicCache(config=model.config)}


class EagerEngine:
    """Generates in eager PyTorch; implements `engine.Engine`.

    Args:
        model: A language model of transformers.
        max_length: Longest sequence in tokens.
        max_waiting: Most sequences that wait.
        eos: Tokens that end a sequence.
    """

    def __init__(self, model: nn.Module, *, max_length: int, max_waiting: int, eos: frozenset[int]) -> None:
        self._model, self._max_length, self._max_waiting, self._eos = model, max_length, max_waiting, eos
        # Guards all below; notified when there is something to do.
        self._changed = threading.Condition()
        self._running: list[_Sequence] = []
        self._waiting: list[_Sequence] = []
        self._closing = False
        self._prompt_tokens = self._generated_tokens = 0
        self._thread = threading.Thread(target=self._work, name="eager-text-generation", daemon=True)
        self._thread.start()

    @property
    def max_length(self) -> int:
        """Most tokens of one sequence, prompt and answer together."""
        return self._max_length

    @property
    def dead(self) -> str | None:
        """None: a step that fails ends its own sequence only."""
        return None

    def when_dead(self, call: Callable[[], None]) -> None:
        """Does nothing: see `dead`."""

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> PromptStream:
        """Starts a prompt of at least one token.

        Raises:
            InvalidInputError: Prompt and answer are too long; the message has the numbers.
            BusyError: Too many sequences wait.
            GenerationError: The engine is closed.
        """
        length = len(prompt) + sampling.max_tokens
        if not prompt or length > self._max_length:
            raise InvalidInputError(
                f"the prompt has {len(prompt)} tokens, and max_tokens is {sampling.max_tokens}: {length} together, of "
                f"at most {self._max_length}, and at least one of the prompt."
            )
        made: list[_Sequence] = []
        stream = PromptStream(sampling.n, lambda: self._cancel(made))
        with self._changed:
            if self._closing:
                raise GenerationError("the engine is closed.")
            if len(self._waiting) + sampling.n > self._max_waiting + max(0, _MOST_RUNNING - len(self._running)):
                raise BusyError(f"{len(self._waiting)} sequences already wait (generate.max_waiting); try again later.")
            made += [_Sequence(choice, prompt, sampling, stream) for choice in range(sampling.n)]
            self._waiting += made
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

    def load(self) -> Load:
        """Returns what it does now."""
        with self._changed:
            return Load(
                len(self._running), len(self._waiting), 0.0, self._prompt_tokens, self._generated_tokens
            )  # fmt: skip

    def close(self) -> None:
        """Ends all sequences; safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._running or self._waiting or self._closing):
                    self._changed.wait()
                while self._waiting and len(self._running) < _MOST_RUNNING:
                    self._running.append(self._waiting.pop(0))
                if self._closing:
                    break
                running = list(self._running)
            ended = [sequence for sequence in running if self._stepped(sequence)]
            with self._changed:
                self._running = [sequence for sequence in self._running if sequence not in ended]
        for sequence in [*self._running, *self._waiting]:
            sequence.stream.put(Piece(sequence.choice, finish="cancelled"))
        self._running, self._waiting = [], []

    def _stepped(self, sequence: _Sequence) -> bool:
        """Generates one token; returns whether the sequence has ended."""
        if sequence.cancelled:
            sequence.stream.put(Piece(sequence.choice, finish="cancelled"))
            return True
        try:
            with torch.inference_mode():
                finish = sequence.step(self._model, self._eos)
        except Exception as error:
            logger.exception("A step of text generation failed")
            text = (str(error).strip().splitlines() or [type(error).__name__])[0]
            sequence.stream.fail(GenerationError(f"a step of generation failed: {type(error).__name__}: {text}"))
            return True
        with self._changed:
            self._generated_tokens += 1
        return finish is not None
