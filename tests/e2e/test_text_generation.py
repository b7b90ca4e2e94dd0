"""Text generated over REST, with OpenAI's own client: equal to eager's, streamed, isolated; in both of TorchServe's
ways to call a handler."""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml
from torchserve_process import ROOT, TorchServeProcess, metric

from chat_models import PROMPTS, eager_tokens, language_model, text_of, tokenizer
from documents import blocks, commands

HELLO: Any = [{"role": "user", "content": "Hello"}]
# Without asyncCommunication, a batch of requests ends before the next begins.
BATCHES = {"asyncCommunication": False, "batchSize": 8, "maxBatchDelay": 100}


def package(server: TorchServeProcess, folder: Path, name: str, *more: Any) -> None:
    command = [sys.executable, "-m", "torchserve_openvino.cli", "package", "--hf", folder, "--task", "text-generation"]
    command += ["--model-name", name, "--export-path", server.model_store, *more]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0 and "task: text_generator" in done.stdout, done.stdout + done.stderr
    answer = server.register(f"{name}.mar", name)
    assert answer.status_code == 200, f"{answer.text}\n{server.log_tail(80)}"
    server.wait_ready(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["joined", pytest.param("batches", marks=pytest.mark.slow)])
def served(
    request: pytest.FixtureRequest, server: TorchServeProcess, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A model's name: from the template as it is, or with batches."""
    config = yaml.safe_load((ROOT / "model-config" / "text-generation.yaml").read_text(encoding="utf-8"))
    config |= BATCHES if request.param == "batches" else {}
    place = tmp_path_factory.mktemp(request.param) / "model-config.yaml"
    place.write_text(yaml.safe_dump(config))
    package(server, folder, request.param, "--config-file", place)
    yield request.param
    pid = server.describe(request.param)["pid"]
    assert httpx.delete(f"{server.management_url}/models/{request.param}", timeout=60).status_code == 200
    for _ in range(100):
        if not psutil.pid_exists(pid):
            return
        time.sleep(0.1)
    raise AssertionError(f"the worker {pid} still runs after the model was unloaded")


@pytest.fixture
def client(served: str, server: TorchServeProcess) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.inference_url}/predictions/{served}/1.0/v1", api_key="none", max_retries=0, timeout=120,
        http_client=httpx.Client(trust_env=False),
    )  # fmt: skip


def url(server: TorchServeProcess, name: str) -> str:
    return f"{server.inference_url}/predictions/{name}"


def test_prompts_of_eight_lengths_at_once_generate_what_eager_does(
    served: str, server: TorchServeProcess, folder: Path
) -> None:
    def ask(prompt: str) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 32, "ignore_eos": True}
        return httpx.post(url(server, served), json=body, timeout=120)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.status_code == 200, answer.text
        wanted = eager_tokens(folder, prompt, 32, ignore_eos=True)
        got = answer.json()
        assert got["text"] == text_of(wanted) and got["generated_tokens"] == 32 and got["finish_reason"] == "length"
    report = server.describe(served)
    assert report["summary"]["coverage"] == 1.0 and report["fallbacks"] == []
    assert report["verify"]["passed"] and report["serving"]["compiles_after_ready"] == 0
    assert report["generate"]["engine"] == "genai" and report["generate"]["now"]["generated_tokens"] >= 256


def test_a_completion_and_its_stream(client: openai.OpenAI, served: str, folder: Path) -> None:
    how: Any = {"model": served, "prompt": "Hello", "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**how)
    text = whole.choices[0].text
    assert text == text_of(eager_tokens(folder, "Hello", 24)) and whole.usage is not None
    assert whole.usage.completion_tokens == len(eager_tokens(folder, "Hello", 24))
    chunks = list(client.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text
    assert chunks[-1].usage == whole.usage and chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    # This model is so small that many of its tokens come together: on a fast machine some hundred of them.
    how |= {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**how, stream=True)]
    assert sum(map(bool, pieces)) > 2, "the answer came in one piece"


def test_a_chat_and_its_stream(client: openai.OpenAI, served: str, folder: Path) -> None:
    how: Any = {"model": served, "messages": HELLO, "temperature": 0, "max_completion_tokens": 24}
    written = tokenizer().apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    wanted = eager_tokens(folder, written, 24, add_special_tokens=False)
    whole = client.chat.completions.create(**how)
    assert whole.choices[0].message.content == text_of(wanted) and whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == ("stop" if wanted[-1] == 2 else "length")
    chunks = list(client.chat.completions.create(**how, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"


def test_stop_n_seed_and_logprobs(client: openai.OpenAI, served: str) -> None:
    def texts(**how: Any) -> list[str]:
        made = client.completions.create(model=served, prompt="Hello", max_tokens=16, **how)
        return [choice.text for choice in made.choices]

    (whole,) = texts(temperature=0)
    stop = whole[6:9]
    assert texts(temperature=0, stop=[stop]) == [whole[: whole.index(stop)]]
    first = texts(temperature=1.3, n=3, seed=5)
    assert first == texts(temperature=1.3, n=3, seed=5) and len(set(first)) == 3
    assert texts(temperature=1.3, seed=5) == first[:1]
    made = client.chat.completions.create(
        model=served, messages=HELLO, max_tokens=5, temperature=0, logprobs=True, top_logprobs=1
    )
    logprobs = made.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 5
    assert all(each.logprob == each.top_logprobs[0].logprob <= 0 for each in logprobs.content)
    (penalized,) = texts(temperature=0, extra_body={"repetition_penalty": 1.8, "top_k": 5})
    assert penalized != whole


def test_errors_of_openais_client(client: openai.OpenAI, served: str) -> None:
    assert [model.id for model in client.models.list()] == [served]
    assert client.models.retrieve(served).id == served
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="Hello")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=served, prompt="Hello", frequency_penalty=0.5)
    assert refused.value.param == "frequency_penalty"
    with pytest.raises(openai.BadRequestError, match="longest sequence"):
        client.completions.create(model=served, prompt=[7] * 600, stream=True)
    with pytest.raises(openai.NotFoundError, match="no endpoint"):
        client.embeddings.create(model=served, input="Hello")


def test_bad_requests_between_good_ones(served: str, server: TorchServeProcess) -> None:
    good = {"prompt": "Hello", "max_tokens": 12}
    bad: list[Any] = [{"prompt": ""}, {"prompt": "a", "x": 1}, {"prompt": "a", "max_tokens": 10**6}, b"\xff\xfe", {}]

    def ask(body: Any) -> httpx.Response:
        how = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(url(server, served), timeout=120, **how)

    bodies = [bad[number // 2 % 5] if number % 2 else good for number in range(40)]
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(ask, bodies))
    assert [answer.status_code for answer in answers] == [400 if number % 2 else 200 for number in range(40)]
    assert len({answer.json()["text"] for answer in answers[::2]}) == 1
    assert all(answer.json()["message"] for answer in answers[1::2])
    assert server.describe(served)["serving"]["counts"]["refused_400"] >= 20


def test_a_client_that_hangs_up_loses_nobody_elses_answer(served: str, server: TorchServeProcess) -> None:
    body = {"prompt": "Hello", "max_tokens": 300, "ignore_eos": True}

    def whole(_: int) -> httpx.Response:
        return httpx.post(url(server, served), json=body, timeout=120)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        others = [pool.submit(whole, number) for number in range(4)]
        with httpx.stream("POST", url(server, served), json={**body, "stream": True}, timeout=60) as stream:
            assert stream.headers["content-type"] == "text/event-stream"
            assert next(stream.iter_text()).startswith("data: ")
        answers = [other.result() for other in others]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.json()["generated_tokens"] for answer in answers} == {300}
    for _ in range(100):
        now = server.describe(served)["generate"]["now"]
        if not now["running"] and not now["waiting"]:
            break
        time.sleep(0.1)
    assert not now["running"] and now["cache_usage"] == 0
    assert whole(0).json() == answers[0].json()


def test_metrics(served: str, server: TorchServeProcess) -> None:
    assert metric(server, "openvino_tokens_total", served) is not None
    httpx.post(url(server, served), json={"prompt": "Hello", "max_tokens": 9, "ignore_eos": True}, timeout=60)
    now = server.describe(served)["generate"]["now"]
    for _ in range(50):
        if metric(server, "openvino_tokens_total", served) == now["prompt_tokens"] + now["generated_tokens"]:
            break
        time.sleep(0.1)
    assert metric(server, "openvino_tokens_total", served) == now["prompt_tokens"] + now["generated_tokens"]
    assert metric(server, "openvino_sequences", served) == 0
    assert metric(server, "openvino_kv_cache_ratio", served) is not None
    for name in ("openvino_time_to_first_token_seconds", "openvino_time_between_tokens_seconds"):
        count, total = (metric(server, f"{name}_{end}", served) for end in ("count", "sum"))
        assert count and total and 0 < total / count < 10


def test_a_worker_that_is_killed_leaves_no_request_without_an_answer(served: str, server: TorchServeProcess) -> None:
    """Its own requests fail at once, the next ones wait for the new worker.

    After the test of the metrics: TorchServe adds up what all workers of a model count.
    """
    body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True}
    wanted = httpx.post(url(server, served), json=body, timeout=120).json()["text"]
    report, ready, over = server.describe(served), threading.Event(), threading.Event()
    assert report["generate"].get("frontend", "patched") == "patched"

    def ask() -> list[int]:
        """Statuses, one after the other, up to the first request that was sent to the new worker."""
        statuses = []
        while not over.is_set():
            last = ready.is_set()
            answer = httpx.post(url(server, served), json=body, timeout=60)
            assert answer.status_code != 200 or answer.json()["text"] == wanted
            statuses.append(answer.status_code)
            if last:
                break
        return statuses

    def kill_at_the_first_piece() -> None:
        """May come too late for the stream, whose other tokens are generated meanwhile."""
        with httpx.stream("POST", url(server, served), json={**body, "stream": True}, timeout=60) as stream:
            for number, _ in enumerate(stream.iter_text()):
                if number == 0:
                    os.kill(report["pid"], signal.SIGKILL)

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(ask) for _ in range(5)]
        try:
            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                kill_at_the_first_piece()
            server.wait_replaced(served, report["pid"])
            ready.set()
            answers = [each.result() for each in asked]
        finally:
            over.set()
    # Each client has at most one request in the worker that is killed; TorchServe may take that for a lack of memory.
    assert all(set(each) <= {200, 500, 507} and len(each) - each.count(200) <= 1 for each in answers), answers
    assert all(each[-1] == 200 for each in answers), answers
    assert server.http.get(f"{server.inference_url}/ping").json()["status"] == "Healthy"


@pytest.mark.slow
def test_the_documented_commands(server: TorchServeProcess, folder: Path) -> None:
    """With the model's name and version of docs/tasks.md."""
    package(server, folder, "text_generator")
    try:
        lines = [line for line in commands() if line.startswith("curl") and "/predictions/text_generator" in line]
        assert len(lines) == 3
        for line in lines:
            here = line.replace("http://127.0.0.1:8080", server.inference_url)
            done = subprocess.run(["bash", "-c", f"{here} -sS"], capture_output=True, text=True, check=True)
            if "stream" in line:
                assert re.findall(r"data: (.*)\n", done.stdout)[-1] == "[DONE]", done.stdout
            else:
                answer = json.loads(done.stdout)
                assert "text" in answer or "choices" in answer, answer
        (code,) = [block.text for block in blocks("python") if "chat.completions" in block.text]
        here = code.replace("http://127.0.0.1:8080", server.inference_url)
        done = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
    finally:
        httpx.delete(f"{server.management_url}/models/text_generator", timeout=60)


@pytest.mark.slow
def test_a_version_called_v1_makes_the_url_short(server: TorchServeProcess, folder: Path) -> None:
    package(server, folder, "short", "--version", "v1")
    try:
        client = openai.OpenAI(
            base_url=f"{server.inference_url}/predictions/short/v1", api_key="none", max_retries=0,
            http_client=httpx.Client(trust_env=False),
        )  # fmt: skip
        made = client.chat.completions.create(model="short", messages=HELLO, max_tokens=3)
        assert made.usage is not None and made.usage.completion_tokens <= 3
    finally:
        httpx.delete(f"{server.management_url}/models/short", timeout=60)
