"""Requests for text: each form is read, and what can't be answered is refused by the name of its field."""

from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from chat_models import tokenizer
from torchserve_openvino.errors import InvalidInputError, ItemError, PayloadTooLargeError
from torchserve_openvino.tasks.generation.reading import (
    CHATS,
    COMPLETIONS,
    GenerationLimits,
    GenerationRequest,
    Prompt,
    RequestReader,
    endpoint_of,
)
from torchserve_openvino.tasks.openai import RequestError, openai_error

LIMITS = GenerationLimits(max_tokens=50, max_length=100, max_bytes=10_000, max_inputs=8, vocabulary=len(tokenizer()))
HELLO = [{"role": "user", "content": "Hello"}]


def reader(*, chats: bool = True) -> RequestReader:
    return RequestReader(tokenizer(chats=chats), "net", LIMITS)


def prompts(asked: GenerationRequest) -> list[Prompt]:
    assert all(isinstance(each, Prompt) for each in asked.prompts)
    return [each for each in asked.prompts if isinstance(each, Prompt)]


def ids(text: str) -> tuple[int, ...]:
    return tuple(tokenizer()(text)["input_ids"])


@pytest.mark.parametrize(
    "body",
    ["Hello", b"Hello", {"inputs": "Hello"}, {"prompt": "Hello"}, b'{"prompt": "Hello"}', {"data": "Hello"}],
)
def test_a_plain_prompt(body: Any) -> None:
    asked = reader().read("", body)
    (prompt,) = prompts(asked)
    assert prompt.tokens == ids("Hello") and asked.form == "plain" and not asked.many
    assert prompt.sampling.temperature == 0 and prompt.sampling.max_tokens == 50


def test_parameters_stand_beside_a_prompt_or_under_parameters() -> None:
    given = {"max_tokens": 3, "temperature": 0.5, "stop": "x", "seed": 7, "top_k": 4, "stream": True, "logprobs": 2}
    one, other = (
        reader().read("", body) for body in ({"prompt": "Hello", **given}, {"inputs": "Hello", "parameters": given})
    )
    assert one == other and one.stops == ("x",) and one.stream and one.logprobs == 2
    assert prompts(one)[0].sampling.max_tokens == 3


def test_the_prompts_of_a_plain_list_are_refused_one_by_one() -> None:
    asked = reader().read("", {"inputs": ["Hello", 7, "long " * 200]})
    assert asked.many and isinstance(asked.prompts[0], Prompt)
    assert [type(each) for each in asked.prompts[1:]] == [RequestError, RequestError]
    assert "more than 100" in str(asked.prompts[2])


def test_a_completion_takes_texts_and_tokens() -> None:
    def tokens(prompt: Any) -> list[tuple[int, ...]]:
        return [each.tokens for each in prompts(reader().read(COMPLETIONS, {"prompt": prompt, "model": "net"}))]

    assert tokens("Hello") == [ids("Hello")]
    assert tokens(["Hello", "you"]) == [ids("Hello"), ids("you")]
    assert tokens([5, 6, 7]) == [(5, 6, 7)]
    assert tokens([[5], [6, 7]]) == [(5,), (6, 7)]


def test_fields_of_openai_that_ask_for_nothing_are_accepted() -> None:
    body = {"prompt": "Hello", "user": "me", "frequency_penalty": 0.0, "best_of": 1, "suffix": None, "seed": None}
    asked = reader().read(COMPLETIONS, body | {"stream": True, "stream_options": {"include_usage": True}, "echo": True})
    assert asked.usage and asked.echo and prompts(asked)[0].text == "Hello"
    # OpenAI's default; plain requests take the most probable token.
    assert prompts(asked)[0].sampling.temperature == 1


def test_a_chat_is_written_by_the_tokenizers_template() -> None:
    parts = [{"type": "text", "text": "Hi"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    how = {"max_completion_tokens": 4, "logprobs": True, "top_logprobs": 3}
    asked = reader().read(CHATS, {"messages": messages, **how})
    (prompt,) = prompts(asked)
    assert tokenizer().decode(prompt.tokens) == "<|system|>Be brief.</s><|user|>Hi</s><|assistant|>"
    assert prompt.sampling.max_tokens == 4 and prompt.sampling.logprobs == 3


@pytest.mark.parametrize("form", [CHATS, COMPLETIONS, ""])
def test_a_share_of_0_takes_the_most_probable_token(form: str) -> None:
    body = {"messages": HELLO} if form == CHATS else {"prompt": "Hello"}
    (prompt,) = prompts(reader().read(form, {**body, "temperature": 1, "top_p": 0}))
    assert 0 < prompt.sampling.top_p <= 1e-6


def test_an_answer_of_the_official_client_is_sent_back_as_it_came() -> None:
    answer = {"role": "assistant", "content": "Hi", "refusal": None}
    message = ChatCompletionMessage.model_validate(answer)
    further = {"tool_calls": None, "function_call": None, "audio": None, "name": None}
    for sent in (message.model_dump(exclude_unset=True), {**answer, **further}):
        asked = reader().read(
            CHATS, {"messages": [*HELLO, sent, *HELLO], "stream": True, "stream_options": {"include_usage": None}}
        )
        assert tokenizer().decode(prompts(asked)[0].tokens).count("<|assistant|>Hi</s>") == 1
    with pytest.raises(RequestError, match=r"messages\[0\]\.tool_calls"):
        reader().read(CHATS, {"messages": [{**answer, "tool_calls": [{"id": "a"}]}]})


REFUSED: list[tuple[str, Any, str, str]] = [
    (COMPLETIONS, {"prompt": "a", "temperatur": 1}, "temperatur", "Did you mean 'temperature'"),
    (COMPLETIONS, {"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
    (COMPLETIONS, {"prompt": "a", "best_of": True}, "best_of", "not supported"),
    (COMPLETIONS, {"prompt": "a", "temperature": 3}, "temperature", "less than or equal to 2"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature", "valid number"),
    (COMPLETIONS, {"prompt": "a", "temperature": float("nan")}, "temperature", ""),
    (COMPLETIONS, {"prompt": "a", "top_p": -0.1}, "top_p", "greater than or equal to 0"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 51}, "max_tokens", "the most is 50"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": True}, "max_tokens", "valid integer"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
    (COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 3}, "n", "9 answers; the most is 8"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x", ""]}, "stop", "none of them empty"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, "stop", "the most is 16"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x", ""),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1}, "echo", "not supported"),
    (COMPLETIONS, {}, "prompt", "required"),
    (COMPLETIONS, {"prompt": None}, "prompt", "must be a text"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "not empty"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "must be a text"),
    (COMPLETIONS, {"prompt": [1, 100_000]}, "prompt", "tokens are numbers from 0"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt[1]", "is empty"),
    (COMPLETIONS, {"prompt": "\ud800"}, "prompt", "half of a surrogate pair"),
    (COMPLETIONS, {"prompt": [5] * 100}, "prompt", "has 100 tokens"),
    (COMPLETIONS, {"prompt": [5] * 60, "max_tokens": 50}, "prompt", "more than 100"),
    (CHATS, {"messages": []}, "messages", "at least 1"),
    (CHATS, {"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "image_url"),
    (CHATS, {"messages": [{"role": "judge", "content": "a"}]}, "messages", "there is no role judge"),
    (CHATS, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    (CHATS, {"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 2}, "max_tokens", "one setting"),
    (CHATS, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools", "not supported"),
    (CHATS, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format", "not supported"),
]


@pytest.mark.parametrize(("path", "body", "param", "said"), REFUSED)
def test_what_is_refused_names_its_field(path: str, body: Any, param: str, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        reader().read(path, body)
    assert refused.value.param == param and said in str(refused.value)
    shown = openai_error(refused.value)["error"]
    assert shown["param"] == param and shown["type"] == "invalid_request_error" and shown["message"]


def test_another_model_is_not_found() -> None:
    with pytest.raises(RequestError, match="serves 'net'") as refused:
        reader().read(CHATS, {"model": "gpt", "messages": HELLO})
    assert refused.value.status == 404 and refused.value.code == "model_not_found"


def test_a_model_without_a_chat_template_says_so() -> None:
    with pytest.raises(RequestError, match="no chat template") as refused:
        reader(chats=False).read(CHATS, {"messages": HELLO})
    assert refused.value.status == 400


@pytest.mark.parametrize("body", [b"{", "no JSON", b"\xff", [1], 7, b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    with pytest.raises(ItemError):
        reader().read(COMPLETIONS, body)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": "a", "max_new_tokens": 3}, "unknown parameter 'max_new_tokens'"),
        ({"inputs": "a", "parameters": {"n": 2}}, "unknown parameter 'n'"),
        ({"inputs": "a", "stream": True}, "under parameters|object parameters"),
        ({"inputs": ["a"], "parameters": {"stream": True}}, "one answer"),
        ({"inputs": ""}, "empty"),
        ({"inputs": "a", "parameters": {"temperature": -1}}, "parameters.temperature"),
        ({"x": 1}, 'needs "inputs"'),
    ],
)
def test_what_is_wrong_with_a_plain_request(body: Any, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        reader().read("", body)


def test_what_is_too_large() -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a" * 10_001}), ("", b'{"prompt": "' + b"a" * 10_001 + b'"}')):
        with pytest.raises(PayloadTooLargeError, match="10000"):
            reader().read(path, body)


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [("", ""), ("v1/completions", COMPLETIONS), ("completions", COMPLETIONS), ("v1/chat/completions", CHATS),
     ("v1/models", "models"), ("models/net", "models/net"), ("v1", "")],
)  # fmt: skip
def test_endpoints(path: str, endpoint: str) -> None:
    assert endpoint_of(path) == endpoint


def test_other_endpoints_are_not_found() -> None:
    with pytest.raises(RequestError, match="v1/chat/completions") as refused:
        endpoint_of("v1/embeddings")
    assert refused.value.status == 404
