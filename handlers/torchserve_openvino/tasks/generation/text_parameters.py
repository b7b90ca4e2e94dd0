"""What a request for text may say: this package's own form, and OpenAI's completions and chats."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from torchserve_openvino.tasks import openai
from torchserve_openvino.tasks.request_body import Parameters

Tokens = Annotated[int, Field(ge=1)]
_LEAST_SHARE = 1e-6
# 0 takes the most probable token, as for OpenAI.
Share = Annotated[float, Field(ge=0, le=1), AfterValidator(lambda share: max(share, _LEAST_SHARE))]
Penalty = Annotated[float, Field(ge=0.01, le=10)]
TopTokens = Annotated[int, Field(ge=0, le=2**31 - 1)]
Top = Annotated[int, Field(ge=0, le=20)]
Choices = Annotated[int, Field(ge=1, le=64)]
# OpenAI's range.
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_MOST_STOPS = 16
# Divided by it, no logit of a model leaves float32, and each is as good as drawn by the largest alone.
_LEAST_TEMPERATURE = 0.001

# OpenAI's fields that are not supported, with the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "best_of": (1,), "suffix": ("",),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False), "functions": ([],),
    "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "store": (False,), "audio": (), "prediction": (), "reasoning_effort": (), "verbosity": (), "web_search_options": (),
}  # fmt: skip


def _stops(value: Any) -> Any:
    """Returns stop texts as a list."""
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("must be a text or a list of texts, none of them empty")
    if len(texts) > _MOST_STOPS:
        raise ValueError(f"has {len(texts)} texts; the most is {_MOST_STOPS}")
    return texts


def _above_zero(temperature: float) -> float:
    """Checks that logits can be divided by a temperature: by a smaller one, they become infinite in float32."""
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise ValueError(f"must be 0, for the most probable token, or at least {_LEAST_TEMPERATURE}")
    return temperature


Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_above_zero)]
Stop = list[str]


class TextParameters(Parameters):
    """What a plain request may set."""

    model_config = ConfigDict(strict=True)

    max_tokens: Tokens | None = None
    """Most tokens to generate; by default and at most ``generate.max_tokens`` of the YAML."""
    temperature: Temperature = 0.0
    """Divides the logits before a token is drawn; 0 takes the most probable token."""
    top_p: Share = 1.0
    """Draws among the most probable tokens that together have this probability."""
    top_k: TopTokens = 0
    """Draws among this many most probable tokens; 0 for all."""
    repetition_penalty: Penalty = 1.0
    """Above 1, tokens that were there before become less probable."""
    seed: Seed | None = None
    """Equal seeds give equal texts."""
    stop: str | Stop = Field(default_factory=list)
    """Texts that end the answer; they are not part of it."""
    logprobs: Top | None = None
    """How many of the most probable tokens to list with each token, with log probabilities; 0 for its own only."""
    ignore_eos: bool = False
    """Whether to go on after an end-of-text token, up to ``max_tokens``."""
    stream: bool = False
    """Whether to send the text piece by piece, as server-sent events."""

    _read_stop = field_validator("stop", mode="before")(_stops)


class StreamOptions(openai.NestedObject):
    """OpenAI's options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class OpenAIRequest(BaseModel):
    """The fields that OpenAI's completions and chats share; top_k, repetition_penalty and ignore_eos are ours."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    max_tokens: Tokens | None = None
    temperature: Temperature = 1.0
    top_p: Share = 1.0
    top_k: TopTokens = 0
    repetition_penalty: Penalty = 1.0
    seed: Seed | None = None
    stop: str | Stop = []
    n: Choices = 1
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    _read_stop = field_validator("stop", mode="before")(_stops)


Prompt = str | list[str] | list[int] | list[list[int]]


class CompletionRequest(OpenAIRequest):
    """``POST v1/completions``."""

    prompt: Prompt
    logprobs: Top | None = None
    echo: bool = False

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        if isinstance(value, str) and value:
            return value
        if isinstance(value, list) and value:
            kinds = ((str,), (int,), (list,))
            if any(all(isinstance(item, kind) and not isinstance(item, bool) for item in value) for kind in kinds):
                return value
        raise ValueError("must be a text, a list of texts, a list of tokens or a list of lists of tokens, not empty")


class Message(openai.NestedObject):
    """One message of a chat."""

    role: Annotated[str, Field(min_length=1)]
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        """Joins a content of parts, of which only texts are read."""
        if not isinstance(value, list):
            return value
        texts = []
        for number, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValueError(f"part {number} is of type {kind!r}; this model reads parts of type 'text' only")
            texts.append(part["text"])
        return "".join(texts)


class ChatRequest(OpenAIRequest):
    """``POST v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool = False
    top_logprobs: Top | None = None


_Request = TypeVar("_Request", bound=BaseModel)


def request_of(kind: type[_Request], body: Any) -> _Request:
    """Checks a request of OpenAI's form.

    Args:
        kind: `CompletionRequest` or `ChatRequest`.
        body: The parsed JSON.

    Raises:
        RequestError: A field is unknown, unsupported, missing or has a value that is not valid; the error names it.
    """
    return openai.request_of(kind, body, UNSUPPORTED)
