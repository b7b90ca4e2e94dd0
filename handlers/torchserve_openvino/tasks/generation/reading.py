"""Reads what a request asks to be generated, whatever its form."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from torchserve_openvino.config.spelling import listed
from torchserve_openvino.errors import InvalidInputError, ItemError, PayloadTooLargeError
from torchserve_openvino.generation.text.engine import Sampling
from torchserve_openvino.serving.requests.json_body import check_json, parse_json
from torchserve_openvino.tasks.generation.text_parameters import (
    ChatRequest,
    CompletionRequest,
    Message,
    OpenAIRequest,
    TextParameters,
    request_of,
)
from torchserve_openvino.tasks.openai import MODELS, RequestError, check_model, unknown_path
from torchserve_openvino.tasks.request_body import TEXT, check_characters, parameters_of, parse_body

Form = Literal["plain", "completion", "chat"]
_PLAIN_KEYS = frozenset({"inputs", "data", "text", "parameters"})


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        tokens: Its tokens.
        sampling: How its answer is chosen.
        text: Its text, for ``echo``.
    """

    tokens: tuple[int, ...]
    sampling: Sampling
    text: str = ""


@dataclass(frozen=True)
class GenerationRequest:
    """What one request asks.

    Attributes:
        form: The form of the request, and so of its answer.
        prompts: Its prompts; those of a plain list that can't be read are refused one by one.
        n: Answers to each prompt.
        stops: Texts that end an answer.
        stream: Whether the answer is sent piece by piece.
        usage: Whether a stream ends with the number of tokens.
        echo: Whether an answer begins with its prompt.
        many: Whether a plain request holds a list, and so its answer does.
    """

    form: Form
    prompts: tuple[Prompt | ItemError, ...]
    n: int = 1
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    echo: bool = False
    many: bool = False

    @property
    def logprobs(self) -> int | None:
        """How many of the most probable tokens are listed with each token; None for no list."""
        return next((prompt.sampling.logprobs for prompt in self.prompts if isinstance(prompt, Prompt)), None)


@dataclass(frozen=True)
class GenerationLimits:
    """What a request may ask.

    Attributes:
        max_tokens: Most tokens of one answer, and what is generated for a request that names no number.
        max_length: Most tokens of prompt and answer together.
        max_bytes: Largest request.
        max_inputs: Most answers to one request.
        vocabulary: Number of tokens that the model knows.
    """

    max_tokens: int
    max_length: int
    max_bytes: int
    max_inputs: int
    vocabulary: int


class RequestReader:
    """Reads requests for one model.

    Args:
        tokenizer: The model's tokenizer.
        name: The model's name in TorchServe.
        limits: What a request may ask.
    """

    def __init__(self, tokenizer: Any, name: str, limits: GenerationLimits) -> None:
        self._tokenizer, self._name, self._limits = tokenizer, name, limits
        # A tokenizer in Rust fails if two threads change its padding, which it sets with each call.
        self._lock = threading.Lock()

    def read(self, path: str, body: Any) -> GenerationRequest:
        """Reads a request.

        Args:
            path: The endpoint: empty for a plain request, `COMPLETIONS` or `CHATS`.
            body: Bytes, text, or JSON that TorchServe has parsed.

        Raises:
            ItemError: The request can't be answered; it says which field is wrong.
        """
        if not path:
            return self._plain(body)
        body = self._parsed(body)
        if path == COMPLETIONS:
            return self._completion(request_of(CompletionRequest, body))
        return self._chat(request_of(ChatRequest, body))

    # --- forms ------------------------------------------------------------------------------------------------

    def _plain(self, body: Any) -> GenerationRequest:
        inputs, parameters, many = self._inputs(body)
        parsed = parameters_of(TextParameters, parameters)
        if parsed.stream and many:
            raise RequestError("a stream has one answer: send one text, or leave out stream", param="stream")
        sampling = Sampling(
            0, parsed.temperature, parsed.top_p, parsed.top_k, parsed.repetition_penalty, parsed.seed,
            logprobs=parsed.logprobs, ignore_eos=parsed.ignore_eos,
        )  # fmt: skip
        prompts: list[Prompt | ItemError] = []
        for prompt in inputs:
            try:
                text = _text(prompt, "inputs")
                prompts.append(self._prompt(self._tokens(text), parsed.max_tokens, sampling))
            except ItemError as error:
                prompts.append(error)
        if not many and isinstance(prompts[0], ItemError):
            raise prompts[0]
        return GenerationRequest("plain", tuple(prompts), stops=tuple(parsed.stop), stream=parsed.stream, many=many)

    def _inputs(self, body: Any) -> tuple[list[Any], Mapping[str, Any], bool]:
        """Returns the inputs of a plain request, its parameters, and whether the inputs are a list."""
        limits = self._limits
        value = body
        is_text = isinstance(body, (bytes, bytearray, str))
        if not is_text or body.lstrip()[:1] in (b"{", "{"):
            value = self._parsed(body)
        if isinstance(value, Mapping):
            if PROMPT in value:
                rest = {name: item for name, item in value.items() if name != PROMPT}
                prompt = value[PROMPT]
                if isinstance(prompt, list):
                    self._check_count(len(prompt), 1)
                return (prompt, rest, True) if isinstance(prompt, list) and prompt else ([prompt], rest, False)
            odd = [name for name in value if name not in _PLAIN_KEYS]
            if odd and value.keys() & (_PLAIN_KEYS - {"parameters"}):
                raise RequestError(
                    f"unknown field {odd[0]!r} beside inputs; parameters stand in the object parameters", param=odd[0]
                )
        ask = parse_body(value, max_bytes=limits.max_bytes, max_inputs=limits.max_inputs, fields=frozenset({PROMPT}))
        return ask.inputs, ask.parameters, ask.many

    def _completion(self, parsed: CompletionRequest) -> GenerationRequest:
        check_model(parsed.model, self._name)
        if parsed.echo and parsed.logprobs is not None:
            raise RequestError("echo with logprobs is not supported: leave one of them out", param="echo")
        prompt = parsed.prompt
        several = isinstance(prompt, list) and isinstance(prompt[0], (str, list))
        sources: Sequence[Any] = prompt if several else [prompt]
        self._check_count(len(sources), parsed.n)
        sampling = replace(_sampling(parsed), logprobs=parsed.logprobs)
        prompts = []
        for number, source in enumerate(sources):
            param = f"prompt[{number}]" if several else "prompt"
            is_text = isinstance(source, str)
            tokens = self._tokens(_text(source, param)) if is_text else self._checked(source, param)
            text = (source if is_text else self.decode(tokens)) if parsed.echo else ""
            prompts.append(self._prompt(tokens, parsed.max_tokens, sampling, text))
        return self._openai("completion", parsed, prompts, echo=parsed.echo)

    def _chat(self, parsed: ChatRequest) -> GenerationRequest:
        check_model(parsed.model, self._name)
        if parsed.top_logprobs is not None and not parsed.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if parsed.max_tokens is not None and parsed.max_completion_tokens is not None:
            raise RequestError(
                "max_tokens and max_completion_tokens are one setting: leave one of them out", param="max_tokens"
            )
        logprobs = (parsed.top_logprobs or 0) if parsed.logprobs else None
        # The template writes the special tokens itself.
        tokens = self._tokens(chat_text(self._tokenizer, parsed.messages), special=False)
        most = parsed.max_completion_tokens or parsed.max_tokens
        prompt = self._prompt(tokens, most, replace(_sampling(parsed), logprobs=logprobs))
        return self._openai("chat", parsed, [prompt])

    def _openai(
        self, form: Form, parsed: OpenAIRequest, prompts: list[Prompt], *, echo: bool = False
    ) -> GenerationRequest:
        self._check_count(len(prompts), parsed.n)
        usage = parsed.stream_options is not None and parsed.stream_options.include_usage
        if parsed.stream_options is not None and not parsed.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        return GenerationRequest(form, tuple(prompts), parsed.n, tuple(parsed.stop), parsed.stream, usage, echo)

    # --- parts ------------------------------------------------------------------------------------------------

    def _check_count(self, prompts: int, n: int) -> None:
        """Limits the answers to one request, before its prompts become tokens."""
        most = self._limits.max_inputs
        if prompts * n > most:
            raise RequestError(
                f"{prompts} prompt(s) times n = {n} are {prompts * n} answers; the most is {most} ({TEXT}.max_inputs)",
                param="n", status=413,
            )  # fmt: skip

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def text_of(self, token: int) -> str:
        """Returns the text of one token, as it is behind others: some decoders drop a space at the beginning."""
        letter, length = self._letter
        return self.decode([*letter, token])[length:]

    @cached_property
    def _letter(self) -> tuple[list[int], int]:
        """A token of text, and how many characters it has at the beginning of a text."""
        with self._lock:
            letter = list(self._tokenizer.encode("a", add_special_tokens=False))[-1:]
        return letter, len(self.decode(letter))

    def _tokens(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        if len(text) > self._limits.max_bytes:
            raise PayloadTooLargeError(
                f"the prompt has {len(text)} characters; the most is {self._limits.max_bytes} "
                "(handler.openvino.text.max_bytes)"
            )
        with self._lock:
            tokens = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        if not tokens:
            raise InvalidInputError("the prompt has no token")
        return tuple(tokens)

    def _checked(self, tokens: Sequence[int], param: str) -> tuple[int, ...]:
        """Returns tokens that came as numbers."""
        if not tokens:
            raise RequestError(f"{param} is empty", param=param)
        for position, token in enumerate(tokens):
            if not 0 <= token < self._limits.vocabulary:
                raise RequestError(
                    f"{param}[{position}] is {token}; tokens are numbers from 0 to {self._limits.vocabulary - 1}",
                    param=param,
                )
        return tuple(tokens)

    def _prompt(self, tokens: tuple[int, ...], most: int | None, sampling: Sampling, text: str = "") -> Prompt:
        """Returns a prompt with the number of tokens that its answer may have."""
        limits = self._limits
        if most is not None and most > limits.max_tokens:
            raise RequestError(
                f"max_tokens is {most}; the most is {limits.max_tokens} (handler.openvino.generate.max_tokens)",
                param="max_tokens",
            )
        room = limits.max_length - len(tokens)
        if room < (most or 1):
            asks = f"{most} token(s) of answer" if most else "one token of answer"
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; with {asks} that is more than {limits.max_length}, the longest "
                "sequence (handler.openvino.generate.max_length)",
                param="prompt", code="context_length_exceeded",
            )  # fmt: skip
        return Prompt(tokens, replace(sampling, max_tokens=most or min(limits.max_tokens, room)), text)

    def _parsed(self, body: Any) -> Any:
        if isinstance(body, (bytes, bytearray, str)):
            if len(body) > self._limits.max_bytes:
                raise PayloadTooLargeError(
                    f"the request has {len(body)} bytes, more than {TEXT}.max_bytes {self._limits.max_bytes}"
                )
            body = parse_json(body)
        check_json(body, max_bytes=self._limits.max_bytes, key=f"{TEXT}.max_bytes")
        return body


def _sampling(parsed: OpenAIRequest) -> Sampling:
    return Sampling(
        0, parsed.temperature, parsed.top_p, parsed.top_k, parsed.repetition_penalty, parsed.seed,
        ignore_eos=parsed.ignore_eos,
    )  # fmt: skip


def _text(value: Any, param: str) -> str:
    """Returns a value that has to be a text.

    Raises:
        RequestError: It is something else, empty, or holds half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise RequestError(f"{param} must be a text, not {type(value).__name__}", param=param)
    if not value:
        raise RequestError(f"{param} is empty", param=param)
    try:
        check_characters(value, param)
    except InvalidInputError as error:
        raise RequestError(str(error), param=param) from None
    return value


# --- messages as the text that a model was trained on -------------------------------------------------------------


def chat_text(tokenizer: Any, messages: Sequence[Message]) -> str:
    """Writes messages as the text that the model was trained on, by the tokenizer's own template.

    Raises:
        RequestError: The tokenizer has no template, or its template refuses the messages.
    """
    import jinja2

    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "this model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json), so it "
            "is none for chats: send a prompt to v1/completions", param="messages", code="no_chat_template",
        )  # fmt: skip
    plain = [message.model_dump(exclude_none=True) for message in messages]
    try:
        return str(tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False))
    except jinja2.TemplateError as error:
        raise RequestError(f"the model's chat template refuses these messages: {error}", param="messages") from error


# --- where a request was sent: what follows the model and its version in the URL ----------------------------------


COMPLETIONS, CHATS = "completions", "chat/completions"
# The field that holds the prompt of a plain request whose parameters stand beside it.
PROMPT = "prompt"


def endpoint_of(path: str) -> str:
    """Returns the endpoint that a URL names after model and version, without its ``v1/``.

    Raises:
        RequestError: There is no such endpoint.
    """
    # The model's own version may be called v1; then the URL names it once.
    name = path.removeprefix("v1/") if path != "v1" else ""
    if name in {"", COMPLETIONS, CHATS, MODELS} or name.startswith(f"{MODELS}/"):
        return name
    known = listed([f"v1/{endpoint}" for endpoint in (COMPLETIONS, CHATS, MODELS)])
    raise unknown_path(path, known)
