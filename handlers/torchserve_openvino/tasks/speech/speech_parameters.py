"""What a request for a transcript may set: Hugging Face's names of it, and OpenAI's."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, field_validator, model_validator

from torchserve_openvino.errors import InvalidInputError
from torchserve_openvino.tasks.forms import Answer
from torchserve_openvino.tasks.request_body import Parameters

# Objects under which Hugging Face's clients send parameters of the generation.
_NESTED = ("generation_parameters", "generate_kwargs")


class SpeechParameters(Parameters):
    """Parameters of a transcript, for models that write text token by token (Whisper). Models for CTC take none."""

    return_timestamps: bool | None = None
    """Whether to answer with the times of segments, under `chunks`. Times of words are not served."""
    language: str | None = None
    """The language that is spoken, such as `en` or `english`. By default the model finds out."""
    task: Literal["transcribe", "translate"] | None = None
    """`transcribe`, or `translate` into English. By default as the model's own settings say."""
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of each window of sound. By default as many as the model can write."""
    num_beams: Annotated[int, Field(ge=1, le=10)] | None = None
    """Beams of the search. By default as the model's own settings say, which mostly is 1."""
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] = 0.0
    """0 takes the best token of each step; more draws one, so that answers differ."""
    prompt: str | None = None
    """A text that comes before, such as names and their spelling. The model reads the last of it only."""

    @field_validator("return_timestamps", mode="before")
    @classmethod
    def _of_segments(cls, value: Any) -> Any:
        if value in ("word", "char"):
            raise ValueError(f"times of each {value} are not served; true gives those of segments")
        return value

    @model_validator(mode="after")
    def _one_search(self) -> "SpeechParameters":
        if self.temperature and (self.num_beams or 1) > 1:
            raise ValueError("num_beams has no effect with a temperature above 0, which draws; leave one of them out")
        return self


# Forms of OpenAI's that have times.
TIMED = frozenset({"srt", "vtt", "verbose_json"})


class OpenAIAudio(Parameters):
    """Fields of OpenAI's ``audio/transcriptions`` and ``audio/translations``, besides the file."""

    model: str | None = None
    """Not read: the path names the model."""
    language: str | None = None
    """The language that is spoken."""
    prompt: str | None = None
    """A text that comes before."""
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    """Form of the answer."""
    temperature: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    """0 takes the best token of each step."""
    timestamp_granularities: Literal["segment"] | None = None
    """Times are those of segments."""
    stream: Literal["false", "False"] | None = None
    """Answers come whole."""

    @field_validator("timestamp_granularities", mode="before")
    @classmethod
    def _of_segments(cls, value: Any) -> Any:
        if value == "word":
            raise ValueError("times of each word are not served; segment gives those of segments")
        return value

    @model_validator(mode="after")
    def _times_have_room(self) -> "OpenAIAudio":
        if self.timestamp_granularities and self.response_format not in TIMED:
            raise ValueError(
                f"timestamp_granularities has no effect with response_format {self.response_format}; verbose_json has "
                "times"
            )
        return self


class Chunk(Answer):
    """A part of a text, with its times."""

    text: str
    """The text."""
    timestamp: tuple[float | None, float | None]
    """Where it begins and ends, in seconds; null where the model did not say."""


class Spoken(Answer):
    """What is said."""

    text: str
    """Its text."""
    chunks: list[Chunk] | None = None
    """Its parts, with `return_timestamps`."""


def flattened(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters with those of the generation beside the others.

    Raises:
        InvalidInputError: One stands in two places, or the place for them is no object.
    """
    outer = {name: value for name, value in parameters.items() if name not in _NESTED}
    for name in _NESTED:
        inner = parameters.get(name)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise InvalidInputError(f"parameters.{name} must be an object, not {type(inner).__name__}")
        if twice := sorted(outer.keys() & inner.keys()):
            raise InvalidInputError(f"{twice[0]!r} stands both in parameters and in parameters.{name}")
        outer |= inner
    return outer
