"""The bodies of answers: this package's own form, and OpenAI's completions and chats; whole, and piece by piece."""

import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torchserve_openvino.errors import ItemError
from torchserve_openvino.serving.requests.batch_answer import AnswerList
from torchserve_openvino.serving.requests.refusals import refusal
from torchserve_openvino.tasks.forms import Answer
from torchserve_openvino.tasks.generation.active_request import ActiveRequest, Choice
from torchserve_openvino.tasks.generation.detokenizer import Delta, PlacedToken
from torchserve_openvino.tasks.generation.reading import GenerationRequest
from torchserve_openvino.tasks.openai import openai_error

# JSON has no infinity; OpenAI writes this for a token that can't be drawn.
_IMPOSSIBLE = -9999.0


class Probable(Answer):
    """A token that could have stood there."""

    token: str
    """Its text."""
    logprob: float
    """Its natural log probability."""


class ListedToken(Probable):
    """A token of an answer."""

    top: list[Probable]
    """The most probable tokens at its place."""


class Generated(Answer):
    """The answer to a prompt."""

    text: str
    """What follows the prompt."""
    finish_reason: str
    """`stop`: an end-of-text token or a stop text; `length`: `max_tokens`."""
    prompt_tokens: int
    """Tokens of the prompt."""
    generated_tokens: int
    """Tokens generated."""
    tokens: list[ListedToken] | None = None
    """The tokens one by one; only where `logprobs` asks for them."""


def event(data: Any) -> str:
    """Returns a server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


class Plain:
    """Bodies of this package's own form.

    Args:
        request: The request.
        name: The model's name.
        text_of: Returns the text of one token.
    """

    def __init__(self, request: GenerationRequest, name: str, text_of: Callable[[int], str]) -> None:
        self.request, self.name, self.text_of = request, name, text_of

    def whole(self, exchange: ActiveRequest) -> Any:
        """Returns the answer in one piece; for a list of prompts, answers and refusals."""
        by_number: dict[int, Any] = dict(exchange.refused)
        for choice in exchange.choices:
            by_number[choice.prompt] = self._answer(exchange, choice)
        answers = [by_number[number] for number in sorted(by_number)]
        return AnswerList(answers) if self.request.many else answers[0]

    def _answer(self, exchange: ActiveRequest, choice: Choice) -> dict[str, Any]:
        prompt = exchange.request.prompts[choice.prompt]
        tokens = (
            {"tokens": [self.listed(token) for token in choice.listed]} if self.request.logprobs is not None else {}
        )
        return {
            "text": choice.text,
            "finish_reason": choice.finish,
            "prompt_tokens": 0 if isinstance(prompt, ItemError) else len(prompt.tokens),
            "generated_tokens": choice.tokens,
            **tokens,
        }

    def listed(self, placed: PlacedToken) -> dict[str, Any]:
        """Returns a token with its alternatives."""
        token = placed.token
        top = [{"token": self.text_of(other), "logprob": _shown(value)} for other, value in token.top]
        return {"token": placed.text, "logprob": _shown(token.logprob), "top": top}

    def begin(self, exchange: ActiveRequest) -> list[Any]:
        """Returns the events before the first text."""
        return []

    def piece(self, exchange: ActiveRequest, choice: Choice, delta: Delta) -> Any:
        """Returns the event for a new piece, and for the end of an answer."""
        if choice.finish is not None and choice.reported:
            return {**self._answer(exchange, choice), "text": delta.text, **self._tokens(delta)}
        return {"text": delta.text, "finish_reason": None, **self._tokens(delta)}

    def _tokens(self, delta: Delta) -> dict[str, Any]:
        return {"tokens": [self.listed(token) for token in delta.tokens]} if self.request.logprobs is not None else {}

    def end(self, exchange: ActiveRequest) -> list[Any]:
        """Returns the events after the last text."""
        return []

    def error(self, error: ItemError) -> Any:
        """Returns the body of a refusal, or the event of a failure in the middle of a stream."""
        return refusal(error)


class _OpenAI(Plain):
    """What OpenAI's two forms share."""

    prefix = ""
    kind = ""
    kind_of_piece = ""

    def __init__(self, request: GenerationRequest, name: str, text_of: Callable[[int], str]) -> None:
        super().__init__(request, name, text_of)
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    def _body(self, kind: str, choices: Iterable[Any], **more: Any) -> dict[str, Any]:
        return {"object": kind, **self._head, "choices": list(choices), **more}

    def whole(self, exchange: ActiveRequest) -> Any:
        choices = [
            self._choice(choice, choice.text, choice.listed, whole=True)
            for choice in sorted(exchange.choices, key=lambda choice_: choice_.index)
        ]
        return self._body(self.kind, choices, usage=_usage(exchange))

    def piece(self, exchange: ActiveRequest, choice: Choice, delta: Delta) -> Any:
        shown = self._choice(choice, delta.text, delta.tokens, whole=False)
        return self._body(self.kind_of_piece, [shown], **self._no_usage())

    def end(self, exchange: ActiveRequest) -> list[Any]:
        return [self._body(self.kind_of_piece, [], usage=_usage(exchange))] if self.request.usage else []

    def error(self, error: ItemError) -> Any:
        return openai_error(error)

    def _no_usage(self) -> dict[str, Any]:
        return {"usage": None} if self.request.usage else {}

    def _choice(self, choice: Choice, text: str, tokens: Sequence[PlacedToken], *, whole: bool) -> dict[str, Any]:
        raise NotImplementedError


class Completion(_OpenAI):
    """Bodies of ``v1/completions``."""

    prefix, kind, kind_of_piece = "cmpl", "text_completion", "text_completion"

    def _choice(self, choice: Choice, text: str, tokens: Sequence[PlacedToken], *, whole: bool) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if self.request.logprobs is not None else None
        finish = choice.finish if whole or choice.reported else None
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_shown(token.token.logprob) for token in tokens],
            "top_logprobs": [self._by_text(token) for token in tokens] if self.request.logprobs else None,
            "text_offset": [token.offset for token in tokens],
        }  # fmt: skip

    def _by_text(self, placed: PlacedToken) -> dict[str, Any]:
        """Returns the most probable texts; of several tokens with one text (parts of characters), the best one."""
        by_text: dict[str, Any] = {}
        for other, value in placed.token.top:
            by_text.setdefault(self.text_of(other), _shown(value))
        # The token itself may be less probable than all of them.
        by_text.setdefault(placed.text, _shown(placed.token.logprob))
        return by_text


class Chat(_OpenAI):
    """Bodies of ``v1/chat/completions``."""

    prefix, kind, kind_of_piece = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self, exchange: ActiveRequest) -> list[Any]:
        """Returns a chunk with the role for each answer."""
        return [
            self._body(
                self.kind_of_piece,
                [{"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                  "finish_reason": None}],
                **self._no_usage(),
            )
            for choice in exchange.choices
        ]  # fmt: skip

    def _choice(self, choice: Choice, text: str, tokens: Sequence[PlacedToken], *, whole: bool) -> dict[str, Any]:
        logprobs = {"content": [self._token(token) for token in tokens]} if self.request.logprobs is not None else None
        shown: dict[str, Any] = {"index": choice.index}
        if whole:
            shown["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            shown["delta"] = {"content": text} if text else {}
        finish = choice.finish if whole or choice.reported else None
        return {**shown, "logprobs": logprobs, "finish_reason": finish}

    def _token(self, placed: PlacedToken) -> dict[str, Any]:
        top = [_with_bytes(self.text_of(other), value) for other, value in placed.token.top]
        return {**_with_bytes(placed.text, placed.token.logprob), "top_logprobs": top}


FORMS: Mapping[str, type[Plain]] = {"plain": Plain, "completion": Completion, "chat": Chat}


def _with_bytes(text: str, logprob: float | None) -> dict[str, Any]:
    # A token that is a part of a character has no text of its own, and so no bytes that could be told.
    raw = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": _shown(logprob), "bytes": raw}


def _usage(exchange: ActiveRequest) -> dict[str, int]:
    prompt, generated = exchange.prompt_tokens, exchange.generated_tokens
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _shown(logprob: float | None) -> float | None:
    # NaN is not above anything either.
    return None if logprob is None else logprob if logprob > _IMPOSSIBLE else _IMPOSSIBLE
