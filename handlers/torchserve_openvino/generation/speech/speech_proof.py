"""Proves a compiled Whisper model before it serves: it writes the tokens that eager PyTorch writes.

Made-up recordings (tones, noise, silence; shorter and longer than the model's window) are transcribed by transformers'
``generate`` in eager PyTorch and in the compiled pieces, each alone and all that are short together. What counts as
equal is said in `generation/text/generation_proof.py`; after a token that differs, a recording is not compared further.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.generation.speech.recordings import QUIET
from torchserve_openvino.generation.text.expected import Expected, Nearness
from torchserve_openvino.generation.text.generation_proof import (
    Count,
    GenerationProof,
    compare,
    least_exact,
    problems_of,
)

# Lengths of the recordings in windows of the model.
_TONES, _NOISE, _SILENCE, _LONG = 0.1, 0.4, 1.0, 1.3
_RIVALS = 8


@dataclass(frozen=True)
class _Step:
    """Scores of one step, after all processors: ``[rows, vocabulary]``, of those recordings that go on."""

    round: int
    places: tuple[int, ...]
    scores: Tensor


class _Written:
    """Takes down what a model finds, step by step; ``generate`` calls it like any processor of scores."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self._round = 0
        self._places: tuple[int, ...] = ()

    def begins(self, progress: Tensor) -> None:
        """Is called before each pass over the recordings, with their places and ends in frames, ``[rows, 2]``."""
        self._round += 1
        self._places = tuple((progress[:, 0] < progress[:, 1]).nonzero()[:, 0].tolist())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Keeps the scores, and returns them as they are."""
        self.steps.append(_Step(self._round, self._places, scores.float().clone()))
        return scores

    def of(self, index: int, ends: frozenset[int]) -> list[tuple[int, Tensor]]:
        """Returns the tokens of one recording, each with the scores that it was taken by."""
        tokens, ended = [], 0
        for step in self.steps:
            # A text that has ended waits for the others of its pass.
            if index in step.places and step.round != ended:
                scores = step.scores[step.places.index(index)]
                tokens.append((int(scores.argmax()), scores))
                ended = step.round if tokens[-1][0] in ends else ended
        return tokens


@dataclass(frozen=True)
class Recorded:
    """Recordings that are transcribed together.

    Attributes:
        features: ``[rows, mel bins, frames]``.
        mask: ``[rows, frames]``, int64: 0 behind a recording's end.
        timestamps: Whether the model writes times between segments.
    """

    features: Tensor
    mask: Tensor
    timestamps: bool


def made_up(
    rate: int, seconds: float, extract: Callable[[np.ndarray], tuple[Tensor, Tensor]], *, timed: bool, together: bool
) -> list[Recorded]:
    """Returns the recordings, the same at each call.

    Args:
        rate: Sampling rate in Hz.
        seconds: The model's window.
        extract: Maps samples to features and mask, of one row each.
        timed: Whether the model writes timestamps, without which it hears no more than a window.
        together: Whether it transcribes several recordings at once.
    """
    draw = np.random.default_rng(0)
    tones, noise, silence = (
        _tones(_TONES * seconds, rate, draw),
        draw.standard_normal(int(_NOISE * seconds * rate)) * 0.1,
        np.zeros(int(_SILENCE * seconds * rate)),
    )
    short = [extract(samples.astype(np.float32)) for samples in (tones, noise, silence)]
    recordings = [Recorded(features, mask, timed) for features, mask in short]
    if timed:
        recordings.append(Recorded(*extract(_tones(_LONG * seconds, rate, draw).astype(np.float32)), timed))
    if together:
        features, mask = (torch.cat(column) for column in zip(*short, strict=True))
        recordings.append(Recorded(features, mask, False))
    return recordings


def _tones(seconds: float, rate: int, draw: np.random.Generator) -> np.ndarray:
    time = np.arange(int(seconds * rate)) / rate
    pitch = draw.uniform(100, 900, size=8)[(time * 8).astype(int) % 8]
    return np.asarray(0.3 * np.sin(2 * np.pi * np.cumsum(pitch) / rate))


def prove(
    eager: Any, compiled: Any, recorded: Sequence[Recorded], tokens: int, forms: Sequence[str], verify: VerifySection,
    *, between: Callable[[], object] = lambda: None,
) -> GenerationProof:  # fmt: skip
    """Transcribes all recordings by both models, and compares what they write.

    Args:
        eager: The model in eager PyTorch.
        compiled: Its stand-in.
        recorded: The recordings.
        tokens: Most tokens of one window.
        forms: Precisions of the compiled model.
        verify: `handler.openvino.verify`: the tolerances.
        between: Called once eager PyTorch has nothing left to do.
    """
    form, count, near, rows = least_exact(forms), Count(), _Near(), 0
    end = eager.generation_config.eos_token_id
    ends = frozenset(end if isinstance(end, list) else [end])
    by_eager = [_written(eager, recording, tokens) for recording in recorded]
    between()
    for recording, theirs in zip(recorded, by_eager, strict=True):
        ours = _written(compiled, recording, tokens)
        for index in range(len(recording.features)):
            expected, written = theirs.of(index, ends), ours.of(index, ends)
            near.add(expected, written)
            answer = [(token, _logprob(scores, token)) for token, scores in written]
            compare(rows, _expected(expected), 0, answer, count, form == "f32")
            rows += 1
    logits = near.total()
    return GenerationProof(
        rows, count.compared, count.equal, count.ties, count.first, count.drift, logits,
        tuple(problems_of(form, count, logits, verify)),
    )  # fmt: skip


def _written(model: Any, recording: Recorded, tokens: int) -> _Written:
    written = _Written()
    with torch.no_grad():
        model.generate(
            input_features=recording.features,
            attention_mask=recording.mask,
            return_timestamps=recording.timestamps,
            logits_processor=[written],
            monitor_progress=written.begins,
            max_new_tokens=tokens,
            num_beams=1,
            **QUIET,
        )
    return written


def _expected(written: Sequence[tuple[int, Tensor]]) -> Expected:
    rivals = []
    for _, scores in written:
        best = scores.log_softmax(-1).topk(min(_RIVALS, len(scores)))
        rivals.append(tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
    return Expected((), tuple(token for token, _ in written), tuple(rivals))


def _logprob(scores: Tensor, token: int) -> float:
    return float(scores.log_softmax(-1)[token])


class _Near:
    """Collects how near scores come; those that processors rule out are left out."""

    def __init__(self) -> None:
        self._found: list[tuple[float, float, float, bool]] = []

    def add(self, expected: Sequence[tuple[int, Tensor]], written: Sequence[tuple[int, Tensor]]) -> None:
        """Adds one recording, up to the first token that differs."""
        for (token, theirs), (other, ours) in zip(expected, written, strict=False):
            allowed = theirs.isfinite() & ours.isfinite()
            one, two = theirs[allowed].double(), ours[allowed].double()
            cosine = float(torch.nn.functional.cosine_similarity(one, two, dim=0))
            self._found.append((cosine, float((one - two).abs().max()), float(one.abs().max()), token == other))
            if token != other:
                return

    def total(self) -> Nearness:
        """Returns all of it."""
        cosines, differences, scales, same = (np.array(column) for column in zip(*self._found, strict=True))
        # NumPy's minimum and maximum keep a NaN.
        return Nearness(
            float(cosines.mean()), float(cosines.min()), float(differences.max()), float(scales.max()),
            float(same.mean()),
        )  # fmt: skip
