"""Opens engines over tiny models for the tests of text generation."""

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.config.sections.generate import GenerateSection
from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.generation.text.engine import Engine, Piece, Sampling
from torchserve_openvino.generation.text.engine_settings import EngineSettings
from torchserve_openvino.generation.text.genai.child_process import Link
from torchserve_openvino.generation.text.genai.engine_messages import End, SequenceUpdate
from torchserve_openvino.generation.text.genai.pipeline import Pipeline, PipelineSettings
from torchserve_openvino.generation.text.genai.stepping import Stepper, serve
from torchserve_openvino.generation.text.opening import Opened, open_engine

# Settings of `verify` for engines that a test opens only to use them.
OFF = {"against": "off"}


def settings(folder: Path, *, verify: dict[str, Any] | None = None, threads: int = 1, **section: Any) -> EngineSettings:
    given = {"max_tokens": 64, **section}
    return EngineSettings(folder, GenerateSection(**given), VerifySection(**(verify or {})), threads)


def opened(folder: Path, store: Store | None = None, **given: Any) -> Opened:
    return open_engine(settings(folder, **given), store)


class Nearby:
    """Stands for `process.Child`: a thread does what the process does, so that a test can change its pipeline."""

    def load(self, folder: Path, settings: PipelineSettings, eos: Sequence[int]) -> Link:
        ours, theirs = multiprocessing.Pipe()
        pipeline = self.pipeline = Pipeline(folder, settings)

        def run() -> None:
            with theirs:
                serve(pipeline, frozenset(eos), theirs)

        threading.Thread(target=run, daemon=True).start()
        return Link(ours, None)


def begun_nearby() -> contextlib.AbstractContextManager[Nearby]:
    """Stands for `process.begun`."""
    return contextlib.nullcontext(Nearby())


def answers(engine: Engine, prompts: list[list[int]], sampling: Sampling) -> list[list[list[int]]]:
    """Generates for all prompts at once; for each prompt, the tokens of each of its sequences."""
    streams = [engine.submit(prompt, sampling) for prompt in prompts]
    return [by_choice(list(stream), sampling.n) for stream in streams]


def by_choice(pieces: list[Piece], n: int = 1) -> list[list[int]]:
    return [[token.id for piece in pieces if piece.choice == choice for token in piece.tokens] for choice in range(n)]


def finishes(pieces: list[Piece]) -> dict[int, str]:
    """The end of each sequence, each of which has exactly one."""
    found = [(piece.choice, piece.finish) for piece in pieces if piece.finish is not None]
    assert len(dict(found)) == len(found)
    return {choice: str(finish) for choice, finish in found}


def until(condition: Any, seconds: float = 20.0) -> None:
    """Waits for it."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Heard:
    """What a stepper has said, and in which step."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper, self.steps = stepper, 0
        self.tokens: dict[int, list[int]] = {}
        self.first: dict[int, int] = {}
        self.ends: dict[int, End] = {}

    def step(self) -> None:
        self.steps += 1
        self.stepper.step()
        for news in self.stepper.read().news:
            self._take(news)

    def _take(self, news: SequenceUpdate) -> None:
        assert news.number not in self.ends
        if news.tokens:
            self.first.setdefault(news.number, self.steps)
        self.tokens.setdefault(news.number, []).extend(news.tokens)
        if news.end is not None:
            self.ends[news.number] = news.end

    def rest(self) -> "Heard":
        while self.stepper.busy:
            self.step()
            assert self.steps < 200
        return self
