"""`torchserve-openvino serve`: archives made for TorchServe, without TorchServe."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import yaml
from commands import package, run
from serve_process import ServeProcess, pack, serving
from torchserve_process import ROOT

from network import CONFIG, make_network
from torchserve_openvino.cli.reports.readiness import ServerAddress, not_ready

for needed in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed, reason="needs the extra serve")

ROW = [1.0, 2.0, 3.0, 4.0]
# Sleeps as long as a request says, or ends its process.
SLEEPER = """
import os, time
import torch
from torchserve_openvino import OpenVINOHandler
class Sleeper(OpenVINOHandler):
    def preprocess(self, data):
        rows = [row["body"] for row in data]
        for row in rows:
            if row.get("sleep"):
                time.sleep(row["sleep"])
            if row.get("die"):
                os._exit(3)
        return torch.tensor([row["x"] for row in rows])
    def postprocess(self, data):
        return data.tolist()
"""


def expected(rows: list[list[float]]) -> torch.Tensor:
    with torch.no_grad():
        return make_network()(torch.tensor(rows))


def check(answer: Any, rows: list[list[float]]) -> None:
    torch.testing.assert_close(torch.tensor(answer), expected(rows), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def server(store: Path, weights: Path) -> Iterator[ServeProcess]:
    first, second = pack(store, "net", weights), pack(store / "two", "net", weights, version="2.0")
    config = CONFIG.replace("60", "3").replace("batchSize: 4", "batchSize: 1\njobQueueSize: 6")
    sleeper = pack(store, "sleeper", weights, config, handler=SLEEPER)
    with serving([first, second, sleeper], store) as running:
        yield running


def test_answers_equal_eager_and_each_request_has_its_own_status(server: ServeProcess) -> None:
    async def together() -> list[httpx.Response]:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            url = f"{server.url}/predictions/net"
            bodies: list[Any] = [[ROW], [[1.0]], [[4.0, 3.0, 2.0, 1.0]]]
            return list(await asyncio.gather(*(client.post(url, json=body) for body in bodies)))

    right, refused, other = asyncio.run(together())
    check(right.json(), [ROW])
    check(other.json(), [[4.0, 3.0, 2.0, 1.0]])
    assert refused.status_code == 400 and "it takes x [batch, 4]" in refused.json()["message"]
    assert refused.headers["x-request-id"] == refused.json()["request_id"]


def test_a_response_does_not_wait_for_the_client_s_acknowledgement(server: ServeProcess) -> None:
    # Nagle's algorithm holds the body back until the kernel has acknowledged the headers, for 40 ms.
    (connection,) = (
        each for each in psutil.Process(server.process.pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN
    )
    with socket.create_connection((connection.laddr.ip, connection.laddr.port)) as client:
        took = []
        for _ in range(10):
            start = time.monotonic()
            client.sendall(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n")
            text = b""
            while b"}" not in text:
                text += client.recv(4096)
            took.append(time.monotonic() - start)
    assert sorted(took)[3] < 0.03


def test_versions_and_what_is_not_there(server: ServeProcess) -> None:
    for path in ("net", "net/1.0", "net/2.0"):
        check(server.post(f"/predictions/{path}", [ROW]).json(), [ROW])
    for path, words in (("nett", "Did you mean 'net'?"), ("net/3.0", "version '3.0' of net is not served")):
        missing = server.post(f"/predictions/{path}", [ROW])
        assert missing.status_code == 404 and words in missing.json()["message"]
    assert [each["modelVersion"] for each in server.get("/models/net/all").json()] == ["1.0", "2.0"]


def test_management_metrics_and_report(server: ServeProcess) -> None:
    assert server.get("/ping").json() == {"status": "Healthy"}
    names = [each["modelName"] for each in server.get("/models").json()["models"]]
    assert names == ["net", "net", "sleeper"]
    (entry,) = server.get("/models/net", params={"customized": "true"}).json()
    report = entry["customizedMetadata"]
    assert report["summary"]["coverage"] == 1.0 and report["verify"]["passed"]
    assert report["config"]["threads"]["workers"] == 1
    lines = server.get("/metrics").text.splitlines()
    assert any(each.startswith('openvino_coverage_ratio{model_name="net"') and each.endswith(" 1.0") for each in lines)
    assert 'openvino_ready_workers{model_name="net",model_version="2.0"} 1.0' in lines


def test_a_url_that_is_not_served_is_refused_as_others_are(server: ServeProcess) -> None:
    missing = server.post("/prediction/net", [ROW])
    assert missing.status_code == 404 and "POST /prediction/net is not served here" in missing.json()["message"]
    assert "ends with /v1" in server.post("/embeddings", {"input": "a"}).json()["message"]
    assert server.http.delete(f"{server.url}/ping").status_code == 405


def test_report_and_why_find_it(server: ServeProcess, tmp_path: Path) -> None:
    done = run("torchserve-openvino report net", tmp_path, "--url", server.url)
    assert done.returncode == 0 and "100.0%" in done.stdout, done.stderr
    assert "net is served" in run("torchserve-openvino why net", tmp_path, "--url", server.url).stdout


def test_kserve_s_version_2(server: ServeProcess) -> None:
    assert server.get("/v2/health/ready").json() == {"ready": True}
    assert server.get("/v2/models/net/ready").json()["ready"]
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": ROW}]}
    answer = server.post("/v2/models/net/versions/2.0/infer", body)
    (output,) = answer.json()["outputs"]
    check([output["data"]], [ROW])
    refused = server.post("/v2/models/net/infer", {"inputs": []})
    assert refused.status_code == 400 and "it takes x [batch, 4]" in refused.json()["error"]
    assert "no model 'nett'" in server.post("/v2/models/nett/infer", body).json()["error"]


def test_limits_of_bodies(server: ServeProcess) -> None:
    large = server.post("/predictions/net", content=b"x" * 6_553_501)
    assert large.status_code == 413 and "--max-request-bytes" in large.json()["message"]
    # Without a length in the header.
    large = server.post("/predictions/net", content=(b"x" * 1_000_000 for _ in range(7)))
    assert large.status_code == 413
    form = server.post("/predictions/net", files={"data": b"x"})
    assert form.status_code == 415 and "curl -T" in form.json()["message"]


def test_the_front_process_has_neither_torch_nor_openvino(server: ServeProcess) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps")
    if not maps.exists():
        pytest.skip("/proc does not show the libraries of a process")
    libraries = maps.read_text()
    assert "libtorch" not in libraries and "openvino" not in libraries
    listening = [c for c in psutil.Process(server.process.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert {each.laddr.ip for each in listening} == {"127.0.0.1"}


def test_a_worker_that_dies_is_replaced_and_fails_its_own_requests_only(server: ServeProcess) -> None:
    (pid,) = server.pids("sleeper")
    died = server.post("/predictions/sleeper", {"x": ROW, "die": True})
    assert died.status_code == 503 and "exit code 3" in died.json()["message"]
    # A request waits for the new worker, no longer than responseTimeout.
    early = server.post("/predictions/sleeper", {"x": ROW})
    assert early.status_code == 200 or "no worker of sleeper 1.0 was free within responseTimeout" in early.text
    server.until(lambda: server.pids("sleeper") not in ([], [pid]))
    check([server.post("/predictions/sleeper", {"x": ROW}).json()], [ROW])
    assert 'openvino_worker_restarts_total{model_name="sleeper",model_version="1.0"} ' in server.get("/metrics").text


def test_a_call_that_hangs_is_refused_and_its_worker_replaced(server: ServeProcess) -> None:
    (pid,) = server.pids("sleeper")
    start = time.monotonic()
    late = server.post("/predictions/sleeper", {"x": ROW, "sleep": 100})
    assert late.status_code == 503 and "responseTimeout (3 s)" in late.json()["message"]
    assert 2.5 < time.monotonic() - start < 10
    server.until(lambda: server.pids("sleeper") not in ([], [pid]))


def test_a_request_whose_client_hangs_up_leaves_the_queue(server: ServeProcess) -> None:
    async def impatient() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            url = f"{server.url}/predictions/sleeper"
            first = asyncio.create_task(client.post(url, json={"x": ROW, "sleep": 1}))
            await asyncio.sleep(0.3)
            others = [asyncio.create_task(client.post(url, json={"x": ROW, "sleep": 2})) for _ in range(5)]
            await asyncio.sleep(0.3)
            for other in others:
                other.cancel()
            assert (await first).status_code == 200

    asyncio.run(impatient())
    start = time.monotonic()
    assert server.post("/predictions/sleeper", {"x": ROW}).status_code == 200
    assert time.monotonic() - start < 1.5


def test_a_reload_loses_no_request(server: ServeProcess, store: Path, tmp_path: Path) -> None:
    network = make_network()
    with torch.no_grad():
        network.last.bias += 1.0
    torch.save(network.state_dict(), tmp_path / "other.pth")

    async def through_the_reload() -> list[httpx.Response]:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            changed = asyncio.create_task(client.post(f"{server.url}/models/net/2.0/reload"))
            answers = []
            while not changed.done():
                answers.append(await client.post(f"{server.url}/predictions/net/2.0", json=[ROW]))
            assert (await changed).status_code == 200, (await changed).text
            return [*answers, await client.post(f"{server.url}/predictions/net/2.0", json=[ROW])]

    (before,) = server.pids("net/2.0")
    pack(store / "two", "net", tmp_path / "other.pth", version="2.0")
    answers = asyncio.run(through_the_reload())
    assert {each.status_code for each in answers} == {200}
    check(answers[0].json(), [ROW])
    torch.testing.assert_close(torch.tensor(answers[-1].json()), expected([ROW]) + 1.0, rtol=1e-4, atol=1e-5)
    server.until(lambda: not psutil.pid_exists(before))


def test_a_reload_that_is_refused_changes_nothing(server: ServeProcess, store: Path, weights: Path) -> None:
    whole = (store / "two" / "net.mar").read_bytes()
    (store / "two" / "net.mar").write_bytes(b"no archive")
    try:
        refused = server.post("/models/net/2.0/reload")
        assert refused.status_code == 409 and "The former state goes on." in refused.json()["message"]
        os.kill(server.process.pid, signal.SIGHUP)
        server.wait_for("change", "net 2.0 is not reloaded")
        assert server.post("/predictions/net/2.0", [ROW]).status_code == 200
    finally:
        (store / "two" / "net.mar").write_bytes(whole)
    through_a_proxy = server.post("/models/net/reload", headers={"x-forwarded-for": "10.0.0.1"})
    assert through_a_proxy.status_code == 403


def ready(server: ServeProcess, *arguments: str) -> str:
    done = run(
        "torchserve-openvino ready --once --management http://127.0.0.1:9", Path(), "--url", server.url, *arguments
    )
    assert done.returncode == (0 if done.stdout.strip().endswith(": ready") else 1), done.stderr
    return done.stdout.strip() or done.stderr.strip()


def test_ready(server: ServeProcess) -> None:
    assert ready(server) == "all models: ready" and ready(server, "net/2.0") == "net/2.0: ready"
    assert "404: no model 'nett' is served here" in ready(server, "nett")
    assert "no server answers at http://127.0.0.1:9" in ready(server, "net", "--url", "http://127.0.0.1:9")
    assert server.get("/v2/health/ready").json() == {"ready": True}

    def waiting() -> int:
        return int(server.model("sleeper")["jobQueueStatus"]["pendingRequests"])

    def while_busy(requests: int, seconds: float) -> str:
        async def busy() -> str:
            async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
                url = f"{server.url}/predictions/sleeper"

                def post() -> asyncio.Task[httpx.Response]:
                    return asyncio.create_task(client.post(url, json={"x": ROW, "sleep": 2.5}))

                # The worker has taken it when the others come, which would otherwise be one too many for the queue.
                posts = [post()]
                await asyncio.sleep(0.4)
                posts += [post() for _ in range(requests - 1)]
                end = time.monotonic() + 1.5
                while (await asyncio.to_thread(waiting)) < requests - 1:
                    assert time.monotonic() < end
                    await asyncio.sleep(0.02)
                answer = await asyncio.to_thread(
                    not_ready, ServerAddress(server.url, "http://127.0.0.1:9"), "sleeper", seconds
                )
                for post in posts[1:]:
                    post.cancel()
                await posts[0]
                return answer

        return asyncio.run(busy())

    assert "no worker answered within 0.5 s" in while_busy(1, 0.5)
    assert "503: 6 requests of sleeper 1.0 are waiting already (jobQueueSize)" in while_busy(7, 5.0)


@pytest.mark.parametrize(("count", "kills"), [(400, 1), pytest.param(10_000, 4, marks=pytest.mark.slow)])
def test_mixed_requests_while_workers_are_killed(store: Path, weights: Path, count: int, kills: int) -> None:
    archive = pack(store / f"load{count}", "load", weights)
    with serving([archive], store / f"load{count}", "--workers", "2") as running:
        report = running.get("/models/load", params={"customized": "true"}).json()[0]["customizedMetadata"]
        assert report["config"]["threads"]["workers"] == 2

        together = asyncio.Semaphore(24)

        async def one(client: httpx.AsyncClient, number: int) -> tuple[int, int]:
            body: Any = [[1.0]] if number % 5 == 0 else [[float(number), 2.0, 3.0, 4.0]]
            # httpx looks through all that wait for a connection, at each answer.
            async with together:
                answer = await client.post(f"{running.url}/predictions/load", json=body)
            if answer.status_code == 200:
                check(answer.json(), body)
            return number, answer.status_code

        async def load() -> list[tuple[int, int]]:
            limits = httpx.Limits(max_connections=24)
            async with httpx.AsyncClient(trust_env=False, timeout=60, limits=limits) as client:
                tasks = [asyncio.create_task(one(client, number)) for number in range(count)]
                for kill in range(kills):
                    # By the answers, however fast the machine is.
                    while sum(task.done() for task in tasks) < (kill + 0.5) * count / (kills + 1):
                        await asyncio.sleep(0.01)
                    # Those killed before start again meanwhile.
                    while not (pids := await asyncio.to_thread(running.pids, "load")):
                        await asyncio.sleep(0.1)
                    os.kill(pids[kill % len(pids)], signal.SIGKILL)
                return list(await asyncio.gather(*tasks))

        answers = asyncio.run(load())
        assert len(answers) == count
        assert {status for number, status in answers if number % 5 == 0} <= {400, 503}
        statuses = Counter(status for number, status in answers if number % 5)
        # No more than those that the last calls of those workers had.
        assert set(statuses) <= {200, 503} and statuses[503] <= 4 * kills, statuses
        running.until(lambda: len(running.pids("load")) == 2)


def test_sigterm_answers_what_runs_and_refuses_what_comes(store: Path, weights: Path) -> None:
    archive = pack(store / "end", "end", weights, handler=SLEEPER)
    running = ServeProcess([archive], store / "end")
    url = running.wait_for("listening")["url"]
    assert httpx.get(f"{url}/ping", trust_env=False).status_code == 503
    loading = httpx.get(f"{url}/v2/health/ready", trust_env=False)
    assert loading.status_code == 503 and "end 1.0: it is loading" in loading.json()["reason"]
    assert running.url == url
    workers = running.pids("end")

    async def during_the_end() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            slow = asyncio.create_task(client.post(f"{url}/predictions/end", json={"x": ROW, "sleep": 2}))
            await asyncio.sleep(0.4)
            running.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.4)
            refused = await client.post(f"{url}/predictions/end", json={"x": ROW})
            return await slow, refused

    try:
        slow, refused = asyncio.run(during_the_end())
        assert slow.status_code == 200 and refused.status_code == 503
        assert "the server stops" in refused.json()["message"]
        assert running.process.wait(20) == 0
        assert not any(psutil.pid_exists(pid) for pid in workers)
    finally:
        running.stop()


@pytest.mark.slow
def test_workers_end_with_a_front_process_that_is_killed(store: Path, weights: Path) -> None:
    with serving([pack(store / "killed", "killed", weights)], store / "killed") as running:
        (pid,) = running.pids("killed")
        running.process.kill()
        running.until(lambda: not psutil.pid_exists(pid), 20)


def failed(folder: Path, *arguments: object) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, "-m", "torchserve_openvino.cli", "serve", *map(str, arguments), "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return done, json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}


@pytest.mark.slow
def test_what_can_not_be_served_is_said_at_once(tmp_path: Path, weights: Path) -> None:
    (tmp_path / "no.mar").write_bytes(b"no")
    done, event = failed(tmp_path, "no.mar", "--port", "0")
    assert done.returncode == 1 and "cannot be read as a .mar" in event["text"]
    done, event = failed(tmp_path, "missing.mar", "--port", "0")
    assert done.returncode == 1 and "missing.mar is not a file" in event["text"]
    net = pack(tmp_path, "net", weights)
    done, event = failed(tmp_path, net, net, "--port", "0")
    assert done.returncode == 1 and "are both net 1.0" in event["text"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done, event = failed(tmp_path, net, "--port", taken.getsockname()[1])
    assert done.returncode == 1 and "Choose another port" in event["text"]
    bad = pack(tmp_path / "bad", "bad", weights, CONFIG.replace("warmup:", "fallback: {min_coverage: 2}, warmup:"))
    done, event = failed(tmp_path, bad, "--port", "0")
    assert done.returncode == 1 and "min_coverage" in event["text"] and "bad.mar" in event["text"]
    done, _ = failed(tmp_path, net, "--workers", "none")
    assert done.returncode == 1 and "--workers must be auto or a number" in done.stderr


def test_a_model_that_nobody_uses_gives_its_worker_back(store: Path, weights: Path) -> None:
    config = CONFIG.replace("handler: {openvino: {", "handler: {openvino: {keep: 2s, ")
    archive = pack(store / "kept", "kept", weights, config)
    with serving([archive], store / "kept") as running:
        (pid,) = running.pids("kept")
        running.wait_for("change", "kept 1.0 is idle")
        running.until(lambda: not psutil.pid_exists(pid))
        (entry,) = running.get("/models").json()["models"]
        assert entry["status"] == "idle" and running.model("kept")["workers"] == []
        # A probe does not load it.
        assert running.get("/v2/health/ready").json() == {"ready": True} and ready(running, "kept") == "kept: ready"
        assert running.model("kept")["status"] == "idle" and running.get("/ping").status_code == 200

        async def three() -> list[httpx.Response]:
            async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
                url = f"{running.url}/predictions/kept"
                return list(await asyncio.gather(*(client.post(url, json=[ROW]) for _ in range(3))))

        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(asyncio.run, three())
            running.until(lambda: running.model("kept")["status"] == "loading")
            # Other models on this server are served meanwhile: it must not be taken out of a load balancer.
            assert running.get("/ping").status_code == 200 and running.get("/v2/health/ready").status_code == 200
            for answer in answers.result():
                check(answer.json(), [ROW])
        assert running.model("kept")["status"] == "READY"


@pytest.mark.slow
def test_more_memory_than_allowed_lets_the_model_rest_that_was_not_used_for_longest(store: Path, weights: Path) -> None:
    names = ["first", "second"]
    archives = [pack(store / "memory", name, weights) for name in names]
    with serving(archives[:1], store / "memory") as running:
        (worker,) = running.model("first")["workers"]
    # One worker fits, two do not.
    with serving(archives, store / "memory", "--memory", f"{worker['memoryUsage'] * 3 // 2 // 10**6}MB") as running:
        running.wait_for("change", " is idle")
        states = {each["modelName"]: each["status"] for each in running.get("/models").json()["models"]}
        running.until(lambda: Counter(running.model(name)["status"] for name in names) == {"READY": 1, "idle": 1})
        states = {name: running.model(name)["status"] for name in names}
        (resting,) = (name for name in names if states[name] == "idle")
        (other,) = (name for name in names if name != resting)
        check(running.post(f"/predictions/{resting}", [ROW]).json(), [ROW])
        running.until(lambda: running.model(other)["status"] == "idle")
        check(running.post(f"/predictions/{resting}", [ROW]).json(), [ROW])


@pytest.mark.slow
def test_generated_text_is_streamed_and_ends_when_the_client_hangs_up(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    from chat_models import language_model

    # Long answers take seconds, however fast the machine is. Nothing but the client's hang-up ends one early.
    folder = language_model(tmp_path / "saved", length=4096)
    config = yaml.safe_load((ROOT / "model-config" / "text-generation.yaml").read_text(encoding="utf-8"))
    config["handler"]["openvino"]["generate"]["max_tokens"] = 4000
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    package("torchserve-openvino package --task text-generation --model-name chat --config-file config.yaml", tmp_path,
            "--hf", str(folder), "--export-path", ".")  # fmt: skip
    with serving([tmp_path / "chat.mar"], tmp_path) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60)
        assert [each.id for each in client.models.list()] == ["chat"]
        options = {"model": "chat", "prompt": "Hello", "temperature": 0, "max_tokens": 12}
        whole = client.completions.create(**options).choices[0].text
        pieces = [each.choices[0].text for each in client.completions.create(**options, stream=True) if each.choices]
        assert "".join(pieces) == whole and len(pieces) > 1
        bad = running.post("/v1/models", {})
        assert bad.status_code == 405

        def generated() -> float:
            """Tokens so far, once no sequence runs."""

            def value(name: str, label: str) -> float:
                lines = [each for each in running.get("/metrics").text.splitlines() if each.startswith(f"{name}{{")]
                return sum(float(each.split()[-1]) for each in lines if label in each)

            running.until(lambda: value("openvino_sequences", 'state="running"') == 0)
            # The gauge is sent once a second.
            time.sleep(2.5)
            running.until(lambda: value("openvino_sequences", 'state="running"') == 0)
            return value("openvino_tokens_total", 'direction="generated"')

        body = {**options, "max_tokens": 3000, "n": 4}
        before = generated()
        start = time.monotonic()
        assert running.post("/v1/completions", body).status_code == 200
        seconds, whole_answer = time.monotonic() - start, generated() - before
        for stream in (True, False):
            before = generated()
            with contextlib.suppress(httpx.ReadTimeout):
                url, wait = f"{running.url}/v1/completions", seconds / 4
                with httpx.stream(
                    "POST", url, json={**body, "stream": stream}, timeout=wait, trust_env=False
                ) as answer:
                    for _ in answer.iter_lines():
                        break
            assert generated() - before < 0.8 * whole_answer
