"""The handler in this process, generating in eager PyTorch: forms of answers, streams, batches."""

import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from serving_worker import sent
from talker import CHAT, COMPLETION, Talker, events

from chat_models import PROMPTS, eager_tokens, text_of, tokenizer
from documents import schema_problems
from torchserve_openvino.errors import ConfigError, ModelLoadError
from torchserve_openvino.serving.requests.tracing import Tracing

REFUSES = {"allow": [], "on_violation": "refuse"}
HELLO = [{"role": "user", "content": "Hello"}]


# --- answers --------------------------------------------------------------------------------------------------


def test_a_batch_generates_what_eager_does(worker: Talker, folder: Path) -> None:
    answers = worker(*[{"prompt": prompt, "max_tokens": 12} for prompt in PROMPTS])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = eager_tokens(folder, prompt, 12)
        assert answer["text"] == text_of(tokens) and answer["generated_tokens"] == len(tokens)
        assert answer["prompt_tokens"] == len(tokenizer()(prompt).input_ids)
        assert answer["finish_reason"] == ("stop" if tokens[-1] == 2 else "length")
        assert schema_problems("text_generator", "answer", answer) == []


def test_a_list_of_prompts_gets_a_list(worker: Talker) -> None:
    (answers,) = worker({"inputs": ["Hello", "", "you"], "parameters": {"max_tokens": 3}})
    assert [each.get("code") for each in answers] == [None, 400, None] and worker.status() == 207
    assert schema_problems("text_generator", "answers", answers) == []
    assert answers[0] == worker.one({"prompt": "Hello", "max_tokens": 3})


def test_a_completion(worker: Talker, folder: Path) -> None:
    body = {"model": "net", "prompt": ["Hello", "you"], "n": 2, "temperature": 0, "max_tokens": 5, "logprobs": 2}
    (answer,) = worker.ask(COMPLETION, body)
    assert answer["object"] == "text_completion" and answer["model"] == "net" and answer["id"].startswith("cmpl-")
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
    texts = [each["text"] for each in answer["choices"]]
    assert texts[0] == texts[1] == text_of(eager_tokens(folder, "Hello", 5)) and texts[2] == texts[3]
    size = sum(len(tokenizer()(prompt).input_ids) for prompt in ("Hello", "you"))
    assert answer["usage"] == {"prompt_tokens": size, "completion_tokens": 20, "total_tokens": size + 20}
    listed = answer["choices"][0]["logprobs"]
    assert len(listed["tokens"]) == len(listed["token_logprobs"]) == len(listed["top_logprobs"]) == 5
    # The token that greedy decoding takes is the most probable one.
    pairs = zip(listed["token_logprobs"], listed["top_logprobs"], strict=True)
    assert all(mine == max(top.values()) for mine, top in pairs)
    assert listed["text_offset"][0] == 0


def test_an_echo(worker: Talker) -> None:
    bodies = [{"prompt": "Hello", "echo": echo, "temperature": 0, "max_tokens": 3} for echo in (True, False)]
    echoed, plain = (worker.ask(COMPLETION, body)[0]["choices"][0]["text"] for body in bodies)
    assert echoed == "Hello" + plain


def test_a_chat(worker: Talker, folder: Path) -> None:
    how = {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    (answer,) = worker.ask(CHAT, {"messages": HELLO, **how})
    (choice,) = answer["choices"]
    written = tokenizer().apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    assert choice["message"]["content"] == text_of(eager_tokens(folder, written, 6, add_special_tokens=False))
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    content = choice["logprobs"]["content"]
    assert len(content) == 6 and all(len(each["top_logprobs"]) == 2 for each in content)
    assert all(each["bytes"] is None or bytes(each["bytes"]).decode() == each["token"] for each in content)


def test_equal_seeds_give_equal_texts(worker: Talker) -> None:
    def texts(seed: int | None, n: int = 3) -> list[str]:
        body = {"prompt": "Hello", "temperature": 1.5, "seed": seed, "n": n, "max_tokens": 12}
        return [each["text"] for each in worker.ask(COMPLETION, body)[0]["choices"]]

    assert texts(7) == texts(7) and texts(7)[0] == texts(7, 1)[0]
    assert len({*texts(7), *texts(99)}) == 6


def test_a_stop_text_ends_the_answer(worker: Talker) -> None:
    body = {"prompt": "Hello", "temperature": 0, "max_tokens": 30}
    whole = worker.ask(COMPLETION, body)[0]["choices"][0]["text"]
    stop = whole[8:11]
    (answer,) = worker.ask(COMPLETION, body | {"stop": [stop, "never there"]})
    choice = answer["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)] and choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 30
    # What was stopped does not run on.
    assert worker.handler.engine.load().running <= 1


def test_the_models(worker: Talker) -> None:
    (answer,) = worker.ask("v1/models", b"")
    assert answer["data"][0]["id"] == "net" and worker.ask("v1/models/net", b"")[0] == answer["data"][0]
    assert worker.ask("v1/models/x", b"")[0]["error"]["code"] == "model_not_found" and worker.status() == 404


# --- times ----------------------------------------------------------------------------------------------------


def test_its_phases_are_in_the_report_and_in_spans(worker: Talker, exporter: Any) -> None:
    def counts() -> dict[str, int]:
        seconds = worker.handler.describe_handle()["serving"]["times"]["seconds"]
        return {phase: each["count"] for phase, each in seconds.items()}

    exporter.clear()
    worker.handler._openvino.tracing = Tracing("net", "1.0")
    try:
        before = counts()
        worker({"prompt": "Hello", "max_tokens": 12}, {"prompt": 7})
        after = counts()
        assert [after[phase] - before[phase] for phase in ("decode", "inference", "encode")] == [1, 1, 1]
        # Nothing is generated for it.
        worker({"prompt": 7})
        assert [counts()[phase] - after[phase] for phase in ("decode", "inference", "encode")] == [1, 0, 0]
        worker.handler._openvino.tracing.flush()
    finally:
        worker.handler._openvino.tracing = None
    spans = exporter.get_finished_spans()
    whole = [each for each in spans if each.name == "predict net"]
    assert [each.attributes["http.response.status_code"] for each in whole] == [200, 400, 400]
    phases = {each.name: each for each in spans if each.parent and each.parent.span_id == whole[0].context.span_id}
    assert list(phases) == ["decode", "inference", "encode"]
    lengths = {name: each.end_time - each.start_time for name, each in phases.items()}
    assert lengths["inference"] > lengths["encode"] and phases["encode"].end_time <= whole[0].end_time


# --- streams --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", COMPLETION, CHAT])
def test_a_stream_says_what_the_whole_answer_says(worker: Talker, path: str) -> None:
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    body = {**asked, "temperature": 0, "max_tokens": 20}
    (whole,) = worker.ask(path, body)
    options = {"stream_options": {"include_usage": True}} if path else {}
    (rest,) = worker.ask(path, {**body, "stream": True, **options})
    assert worker.made.context.get_response_content_type(0) == "text/event-stream"
    found = events(worker.streamed() + rest.encode())
    if not path:
        assert "".join(each["text"] for each in found) == whole["text"]
        assert found[-1] | {"text": whole["text"]} == whole
        return
    *pieces, last = found
    assert last["choices"] == [] and last["usage"] == whole["usage"] and pieces[0]["usage"] is None
    key = "delta" if path == CHAT else "text"
    if path == CHAT:
        assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        texts = [each["choices"][0][key].get("content", "") for each in pieces]
        assert "".join(texts) == whole["choices"][0]["message"]["content"]
    else:
        assert "".join(each["choices"][0][key] for each in pieces) == whole["choices"][0]["text"]
    assert len({each["id"] for each in found}) == 1
    assert [each["choices"][0]["finish_reason"] for each in pieces][-2:] == [None, "length"]


def test_streams_and_bad_requests_in_one_batch(worker: Talker, folder: Path) -> None:
    good = {"prompt": "Hello", "max_tokens": 6}
    answers = worker(good, {"prompt": ""}, {**good, "stream": True}, {**good, "max_tokens": 10_000}, {"x": 1}, good)
    assert [worker.status(place) for place in range(6)] == [200, 400, 200, 400, 400, 200]
    assert "generate.max_tokens" in answers[3]["message"] and answers[0] == answers[5]
    assert answers[0]["text"] == text_of(eager_tokens(folder, "Hello", 6))
    assert "".join(each["text"] for each in events(worker.streamed() + answers[2].encode())) == answers[0]["text"]


def test_errors_have_openais_form_at_openais_endpoints(worker: Talker) -> None:
    (answer,) = worker.ask(COMPLETION, {"prompt": "Hello", "temperatur": 1})
    assert worker.status() == 400 and answer["error"]["param"] == "temperatur"
    (answer,) = worker.ask("v1/embeddings", {"input": "Hello"})
    assert worker.status() == 404 and answer["error"]["code"] == "unknown_url"
    (answer,) = worker.ask(COMPLETION, b"{")
    assert worker.status() == 400 and "not valid JSON" in answer["error"]["message"]


def test_what_the_engine_refuses_is_refused_and_nothing_runs_on(folder: Path, tmp_path: Path) -> None:
    small = {"handler": {"openvino": {"generate": {"max_waiting": 1, "max_length": 64, "max_tokens": 32}}}}
    talker = Talker(tmp_path / "archive", folder, **small)
    try:
        (answer,) = talker.ask(COMPLETION, {"prompt": "Hello", "n": 10, "max_tokens": 30})
        assert talker.status() == 503 and answer["error"]["code"] == "overloaded"
        (answer,) = talker.ask(COMPLETION, {"prompt": [7] * 60, "max_tokens": 10})
        assert talker.status() == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert talker.ask(COMPLETION, {"prompt": "Hello", "max_tokens": 3})[0]["choices"]
        for _ in range(100):
            if not talker.handler.engine.load().running:
                break
            time.sleep(0.05)
        assert talker.handler.engine.load().running == 0
    finally:
        talker.close()


# --- the worker -----------------------------------------------------------------------------------------------


def test_the_report(worker: Talker) -> None:
    report = worker.report()
    assert report["generate"]["engine"] == "eager" and report["generate"]["now"]["generated_tokens"] > 0
    assert report["task"]["name"] == "text_generator" and "max_tokens" in report["task"]["parameters"]["properties"]
    assert any("eager PyTorch" in note for note in report["notes"])
    jsonschema.Draft202012Validator.check_schema(report["task"]["parameters"])


def test_a_fallback_that_the_policy_refuses(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = {"handler": {"openvino": {"fallback": REFUSES}}}
    talker = Talker(tmp_path / "archive", folder, **policy)
    submit, tracker = talker.handler.engine.submit, talker.handler.report.tracker

    def falls_back(*given: Any) -> Any:
        tracker.add_fallback("runtime_failed", "aten.mm.default", reason="as the test wants", caused_by_request=True)
        return submit(*given)

    monkeypatch.setattr(talker.handler.engine, "submit", falls_back)
    try:
        (answer,) = talker.ask(COMPLETION, {"prompt": "Hello", "max_tokens": 3})
        assert answer["error"]["type"] and "fallback does not allow it" in answer["error"]["message"]
        (rest,) = talker.ask(COMPLETION, {"prompt": "Hello", "max_tokens": 3, "stream": True})
        assert b"fallback does not allow it" in talker.streamed() + str(rest).encode()
        monkeypatch.undo()
        assert talker.ask(COMPLETION, {"prompt": "Hello", "max_tokens": 3})[0]["choices"]
    finally:
        talker.close()


def test_metrics(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def found(name: str) -> list[tuple[str, str]]:
        # Other workers of this process send theirs as well.
        rows = sent(caplog, name)
        return [(value, labels.split(",")[0].rpartition(":")[2]) for value, labels in rows if "measured" in labels]

    with caplog.at_level("INFO"):
        talker = Talker(tmp_path / "archive", folder, "measured")
        try:
            assert found("openvino_tokens_total") == [("0", "prompt"), ("0", "generated")]
            assert found("openvino_sequences") == [("0", "running"), ("0", "waiting")]
            assert found("openvino_kv_cache_ratio")
            (answer,) = talker({"prompt": "Hello", "max_tokens": 5})
            # Counts are sent once a second.
            for _ in range(60):
                if len(found("openvino_tokens_total")) == 4:
                    break
                time.sleep(0.1)
        finally:
            talker.close()
    assert found("openvino_tokens_total")[2:] == [(str(answer["prompt_tokens"]), "prompt"), ("5", "generated")]
    assert len(found("openvino_time_to_first_token_seconds")) == 1
    ((between, _),) = found("openvino_time_between_tokens_seconds")
    assert 0 < float(between) < 10
    assert found("openvino_sequences")[-1][0] == "0"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"asyncCommunication": True, "batchSize": 4}, "batchSize: 1"),
        ({"continuousBatching": True}, "asyncCommunication: true"),
        ({"handler": {"openvino": {"verify": {"shadow": 0.1}}}}, "verify.shadow"),
        ({"handler": {"openvino": {"warmup": {"inputs": [{"shape": [4]}]}}}}, "warmup.inputs"),
    ],
)
def test_settings_that_do_not_belong_here(folder: Path, tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ModelLoadError), match=re.escape(said)):
        Talker(tmp_path / "archive", folder, **keys)


def test_what_fails_unexpectedly_fails_alone(worker: Talker, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = worker.handler._reader.decode
    broken = tuple(tokenizer()("you").input_ids)
    good = {"prompt": "Hello", "max_tokens": 4}
    (wanted,) = worker(good)

    def fails_on_one(tokens: Any) -> str:
        if tokens and fails:
            fails.clear()
            raise OverflowError("no such token")
        return decode(tokens)

    for body in (good, {**good, "stream": True}):
        fails = {broken}
        monkeypatch.setattr(worker.handler._reader, "decode", fails_on_one)
        failed, answer = worker(body, good)
        monkeypatch.undo()
        assert answer == wanted and "OverflowError" in str(failed) and worker.status(0) == 500


def test_a_stream_that_fails_after_its_beginning_ends_with_the_error_which_is_counted_and_logged(
    worker: Talker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def count() -> int:
        return int(worker.handler.describe_handle()["serving"]["counts"].get("refused_500", 0))

    before = count()
    decode, calls = worker.handler._reader.decode, []

    def fails_later(tokens: Any) -> str:
        calls.append(tokens)
        if len(calls) > 12:
            raise OverflowError("no such token")
        return decode(tokens)

    monkeypatch.setattr(worker.handler._reader, "decode", fails_later)
    (rest,) = worker.ask(COMPLETION, {"prompt": "Hello", "temperature": 0, "max_tokens": 60, "stream": True})
    monkeypatch.undo()
    everything = worker.streamed() + rest.encode()
    *pieces, last = events(everything)
    assert pieces and all(piece["choices"] for piece in pieces) and everything.count(b"[DONE]") == 1
    assert "OverflowError" in last["error"]["message"] and last["error"]["type"] == "server_error"
    assert count() == before + 1 and "is answered with 500" in caplog.text


def test_there_are_no_explanations(worker: Talker) -> None:
    worker.made.handle(worker.handler, {"prompt": "Hello"}, explain="True")
    assert worker.status() == 501


def test_the_last_piece_of_a_short_stream_does_not_wait_for_the_longest(worker: Talker) -> None:
    bodies = [{"prompt": "Hello", "max_tokens": most, "stream": True, "ignore_eos": True} for most in (2, 40)]
    (short, _) = worker.ask(COMPLETION, *bodies)
    worker.streamed()
    # Everything was sent while the other one went on.
    assert short == ""


def test_negative_seeds_and_the_drawn_token_among_the_most_probable(worker: Talker) -> None:
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 2.0, "seed": -(2**63), "logprobs": 1}
    (choice,), (again,) = (answer["choices"] for answer in worker.ask(COMPLETION, body, body))
    assert choice["text"] == again["text"]
    for token, top in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
        assert token in top
