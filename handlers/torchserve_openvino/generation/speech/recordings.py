"""Recordings, how they are transcribed, and what is heard in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchserve_openvino.errors import GenerationError

# Most passes over a recording: one for each half second, and some more. Speech needs one for some ten seconds; a
# model that goes ahead in hundredths of a second would be busy for hours.
_PASSES, _PASSES_PER_SECOND = 20, 2
# Arguments of ``generate`` that leave out what a compiled model does not return.
QUIET: Mapping[str, Any] = {"return_dict_in_generate": False, "temperature": 0.0}


@dataclass(frozen=True)
class TranscriptionSettings:
    """How a recording is transcribed. Recordings with equal ones may be transcribed together.

    Attributes:
        language: The language that is spoken, as a token such as ``<|en|>``; None to find out.
        task: ``transcribe`` or ``translate``; None for the model's own default.
        timestamps: Whether times are asked for.
        max_new_tokens: Most tokens of one window; None for the model's own limit.
        num_beams: Beams of the search; None for the model's own number.
        temperature: 0 takes the best token; more draws one, and has no beams.
        prompt: A text that comes before, in tokens.
    """

    language: str | None = None
    task: str | None = None
    timestamps: bool = False
    max_new_tokens: int | None = None
    num_beams: int | None = None
    temperature: float = 0.0
    prompt: tuple[int, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of ``generate``, but for lengths and times."""
        settings: Mapping[str, Any] = {
            "language": self.language, "task": self.task, "num_beams": self.num_beams,
            "prompt_ids": torch.tensor(self.prompt) if self.prompt else None,
        }  # fmt: skip
        chosen = {name: value for name, value in settings.items() if value is not None}
        return {**QUIET, **chosen, "temperature": self.temperature}


@dataclass(frozen=True)
class Sound:
    """A recording, ready for the model.

    Attributes:
        features: Its spectrogram ``[1, mel bins, frames]``: one window, or longer.
        mask: ``[1, frames]``, int64: 0 behind its end.
        seconds: Its length.
    """

    features: Tensor
    mask: Tensor
    seconds: float


@dataclass(frozen=True)
class Segment:
    """A piece of a text with its times.

    Attributes:
        start: Where it begins, in seconds.
        end: Where it ends.
        text: The text.
        tokens: Its tokens, without those for times.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Transcript:
    """What is said in a recording.

    Attributes:
        text: The text.
        chunks: Its parts with times, as transformers' pipeline has them; None if times were not asked for.
        segments: Its parts with times, as ``generate`` has them.
        language: Its language's name in English; empty if unknown.
        seconds: Length of the recording.
    """

    text: str
    chunks: list[dict[str, Any]] | None
    segments: tuple[Segment, ...]
    language: str
    seconds: float


class Passes:
    """Counts how often a model goes over recordings; ``generate`` calls it before each pass.

    Args:
        seconds: Length of the longest recording.
    """

    def __init__(self, seconds: float) -> None:
        self._most = _PASSES + int(_PASSES_PER_SECOND * seconds)
        self._count = 0

    def __call__(self, progress: Tensor) -> None:
        """Counts one.

        Raises:
            GenerationError: It is one too many.
        """
        self._count += 1
        if self._count > self._most:
            raise GenerationError(
                f"the model does not get through this recording: after {self._most} passes it is at frame "
                f"{int(progress[:, 0].min())} of {int(progress[:, 1].max())}"
            )
