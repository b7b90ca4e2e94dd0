"""`torchserve-openvino serve` with clients and handlers that misbehave: one of them costs nobody else anything."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from serve_process import ServeProcess, pack, serving

from network import CONFIG
from torchserve_openvino.hosts.serve.worker_process import WorkerProcess

for needed in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed, reason="needs the extra serve")

ROW = {"x": [1.0, 2.0, 3.0, 4.0]}
# Does what a request says.
HANDLER = """
import os, time
import torch
from ts.handler_utils.utils import send_intermediate_predict_response
from torchserve_openvino import OpenVINOHandler
class Faulty(OpenVINOHandler):
    def initialize(self, context):
        slow = os.environ.get("SLOW_AFTER")
        if slow and os.path.exists(slow):
            time.sleep(60)
        super().initialize(context)
    def preprocess(self, data):
        rows = [row["body"] for row in data]
        tenant = self.context.get_request_header(0, "X-Tenant")
        if tenant:
            self.context.set_response_header(0, "X-Tenant-Was", tenant)
            self.context.set_response_header(0, "Content-Length", "1")
            self.context.set_response_header(0, "X-Split", "a\\r\\nX-Injected: b")
        for row in rows:
            if row.get("fork") and os.fork() == 0:
                time.sleep(15)
                os._exit(0)
            if row.get("metrics"):
                metrics = self.context.metrics
                metrics.add_counter("calls", 1)
                metrics.add_time("calls", 3)
                metrics.add_counter("others", -1)
            for _ in range(row.get("pieces", 0)):
                send_intermediate_predict_response(["piece "], self.context.request_ids, "", 200, self.context)
                time.sleep(row.get("pause", 0))
            time.sleep(row.get("sleep", 0))
            if row.get("die"):
                os._exit(3)
        return torch.tensor([row["x"] for row in rows])
    def postprocess(self, data):
        return data.tolist()
"""
PREDICT = "/predictions/faulty"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Path:
    config = CONFIG.replace("60", "3").replace("batchSize: 4", "batchSize: 1\njobQueueSize: 6")
    return pack(tmp_path_factory.mktemp("faults"), "faulty", weights, config, handler=HANDLER)


@pytest.fixture(scope="module")
def server(archive: Path) -> Iterator[ServeProcess]:
    with serving([archive], archive.parent) as running:
        yield running


def connect(server: ServeProcess, sent: bytes = b"") -> socket.socket:
    url = urlsplit(server.url)
    client = socket.create_connection((url.hostname, url.port), timeout=30)
    client.sendall(sent)
    return client


def post(body: bytes, version: str = "1.1", length: int | None = None) -> bytes:
    head = f"POST {PREDICT} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{length or len(body)}\r\n\r\n".encode() + body


def until_end(client: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):
        while piece := client.recv(1 << 16):
            received += piece
    return received


def in_background(run: Any, *args: Any, **options: Any) -> threading.Thread:
    thread = threading.Thread(target=run, args=args, kwargs=options, daemon=True)
    thread.start()
    return thread


def test_a_large_head_does_not_reach_the_worker(server: ServeProcess) -> None:
    pids = server.pids("faulty")
    head = b"POST /predictions/faulty HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nA: "
    client = connect(server)
    with suppress(ConnectionError):
        client.sendall(head + b"\xff" * (12 << 20) + b"\r\n\r\n{}")
    with suppress(ConnectionError):
        assert b" 431 " in client.recv(1 << 16)
    assert server.post(PREDICT, ROW).status_code == 200 and server.pids("faulty") == pids


def test_metrics_that_prometheus_does_not_allow_are_dropped(server: ServeProcess) -> None:
    pids = server.pids("faulty")
    for _ in range(3):
        assert server.post(PREDICT, {**ROW, "metrics": True}).status_code == 200
        time.sleep(0.6)
    assert server.pids("faulty") == pids
    assert "calls_total{" in server.get("/metrics").text
    assert "Values of the metric others are dropped" in server.log.read_text()


def test_a_dead_worker_whose_child_lives_on_is_replaced(server: ServeProcess) -> None:
    assert server.post(PREDICT, {**ROW, "fork": True}).status_code == 200
    (pid,) = server.pids("faulty")
    os.kill(pid, signal.SIGKILL)
    server.until(lambda: server.pids("faulty") not in ([], [pid]), 13)
    assert server.post(PREDICT, ROW).status_code == 200


def test_an_upload_during_a_reload_is_answered_by_the_new_state(server: ServeProcess) -> None:
    body = json.dumps(ROW).encode()
    client = connect(server, post(body[:5], length=len(body)))
    assert server.post("/models/faulty/reload").status_code == 200
    time.sleep(0.5)
    start = time.monotonic()
    client.sendall(body[5:])
    assert b"HTTP/1.1 200" in client.recv(1 << 16) and time.monotonic() - start < 2


def test_a_reload_does_not_cut_a_stream(server: ServeProcess) -> None:
    # It takes longer than responseTimeout (3 s), which is the longest pause.
    answers: list[str] = []
    body = {**ROW, "pieces": 5, "pause": 1}
    stream = in_background(lambda: answers.append(server.post(PREDICT, body).text))
    time.sleep(0.5)
    assert server.post("/models/faulty/reload").status_code == 200
    assert server.post(PREDICT, ROW).status_code == 200
    stream.join(30)
    assert answers[0].count("piece ") == 5 and "[1.0" not in answers[0] and answers[0].endswith("]")


def test_a_stream_that_fails_does_not_look_whole(server: ServeProcess) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        server.post(PREDICT, {**ROW, "pieces": 1, "sleep": 0.2, "die": True})
    server.until(lambda: server.pids("faulty") != [])


def test_a_response_that_breaks_off_before_it_is_sent_is_refused(server: ServeProcess) -> None:
    body = json.dumps({**ROW, "pieces": 1, "die": True}).encode()
    answer = until_end(connect(server, post(body, "1.0")))
    assert answer.startswith(b"HTTP/1.1 503") and b"its worker ended" in answer and b"piece" not in answer
    server.until(lambda: server.pids("faulty") != [])


def test_http_1_0_gets_an_answer_in_one_piece(server: ServeProcess) -> None:
    answer = until_end(connect(server, post(json.dumps({**ROW, "pieces": 2, "pause": 0.2}).encode(), "1.0")))
    assert b"chunked" not in answer and b"piece piece " in answer


def test_probes_that_nobody_waits_for_fill_no_queue(server: ServeProcess) -> None:
    call = in_background(server.post, PREDICT, {**ROW, "sleep": 2.5})
    # Before the call begins, probes are answered.
    late, until = 0, time.monotonic() + 10
    while late < 8 and time.monotonic() < until:
        try:
            httpx.get(f"{server.url}/v2/health/ready", timeout=0.1, trust_env=False)
        except httpx.ReadTimeout:
            late += 1
    assert late == 8
    assert server.model("faulty")["jobQueueStatus"]["pendingRequests"] <= 1
    assert server.post(PREDICT, ROW).status_code == 200
    call.join(10)


def test_an_id_of_a_request_is_one_word(server: ServeProcess) -> None:
    for claimed in (b"a\xc2\x85b", b"x" * 1000):
        answer = server.post(PREDICT, {"x": [1.0]}, headers={"x-request-id": claimed})  # type: ignore[dict-item]
        assert len(answer.headers["x-request-id"]) == 32
    assert server.post(PREDICT, ROW, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"


def refused_or_answered(server: ServeProcess, body: Any) -> None:
    with suppress(httpx.HTTPError):
        server.post(PREDICT, body)


def ends_within(server: ServeProcess, seconds: float) -> None:
    start = time.monotonic()
    assert server.process.wait(seconds + 20) == 0
    assert time.monotonic() - start < seconds, server.events


def test_clients_that_neither_send_nor_read_do_not_delay_the_end(archive: Path) -> None:
    with serving([archive], archive.parent, "--grace", "2") as server:
        half = connect(server, post(b"{", length=1000))
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        url = urlsplit(server.url)
        reader.connect((url.hostname, url.port))
        for _ in range(50):
            reader.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        ends_within(server, 10)
        half.close(), reader.close()


def test_a_second_signal_ends_the_server_at_once(archive: Path) -> None:
    with serving([archive], archive.parent, "--grace", "60") as server:
        call = in_background(refused_or_answered, server, {**ROW, "sleep": 2.9})
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("stopping")
        assert server.post("/models/faulty/reload").status_code == 503
        server.process.send_signal(signal.SIGTERM)
        ends_within(server, 2)
        call.join(10)


def test_headers_are_read_by_any_name_and_sent_unless_they_are_the_server_s(server: ServeProcess) -> None:
    answer = server.post(PREDICT, ROW, headers={"X-Tenant": "a"})
    assert answer.status_code == 200 and answer.json()
    assert answer.headers["x-tenant-was"] == "a"
    assert "x-split" not in answer.headers and "x-injected" not in answer.headers
    stream = server.post(PREDICT, {**ROW, "pieces": 2, "pause": 0.2}, headers={"X-Tenant": "a"})
    assert stream.headers["x-tenant-was"] == "a" and "x-split" not in stream.headers
    assert "ts_stream_next" not in stream.headers and stream.text.startswith("piece piece ")


def test_a_full_queue_refuses_in_the_form_of_the_client_and_is_counted(server: ServeProcess) -> None:
    before = refusals(server, 503)
    running = [in_background(refused_or_answered, server, {**ROW, "sleep": 1.0}) for _ in range(8)]
    server.until(lambda: server.model("faulty")["jobQueueStatus"]["pendingRequests"] == 6, 10)
    openai = server.post(f"{PREDICT}/v1/embeddings", ROW)
    kserve = server.post("/v2/models/faulty/infer", {"inputs": []})
    tei = server.post("/embed", ROW)
    plain = server.post(PREDICT, ROW)
    for thread in running:
        thread.join()
    assert [answer.status_code for answer in (openai, kserve, tei, plain)] == [503] * 4
    assert "jobQueueSize" in openai.json()["error"]["message"] and openai.json()["error"]["type"] == "server_error"
    assert "jobQueueSize" in kserve.json()["error"]
    assert "jobQueueSize" in tei.json()["error"] and tei.json()["error_type"] == "Overloaded"
    assert "jobQueueSize" in plain.json()["message"]
    assert server.post("/v1/embeddings", ROW, headers={"content-type": "application/json"}).status_code == 200
    broken = server.http.post(f"{server.url}/v1/embeddings", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400 and broken.json()["error"]["type"] == "invalid_request_error"
    assert refusals(server, 503) >= before + 4


def refusals(server: ServeProcess, code: int) -> float:
    """How many requests were refused with a status, by the server's metrics."""
    lines = [line for line in server.get("/metrics").text.splitlines() if "refused_items_total{" in line]
    return sum(float(line.split()[-1]) for line in lines if f'code="{code}"' in line)


def test_what_was_counted_is_shown_though_no_call_follows(server: ServeProcess) -> None:
    status = server.post(PREDICT, {"y": 1}).status_code
    assert status >= 400
    server.until(lambda: refusals(server, status) >= 1, 10)
    before = refusals(server, status)
    for _ in range(5):
        assert server.post(PREDICT, {"y": 1}).status_code == status
    server.until(lambda: refusals(server, status) == before + 5, 10)


def test_nobody_has_to_read_the_events(archive: Path) -> None:
    command = [sys.executable, "-m", "torchserve_openvino.cli", "serve", str(archive), "--json", "--port", "0"]
    log = archive.parent / "unread.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd=archive.parent)
    try:
        assert process.stdout is not None
        events = (json.loads(line) for line in process.stdout)
        url = next(event["url"] for event in events if event["event"] == "ready")
        process.stdout.close()
        models = f"{url}/models/faulty"
        for _ in range(2):
            ((worker,),) = (entry["workers"] for entry in httpx.get(models, trust_env=False).json())
            os.kill(worker["pid"], signal.SIGKILL)
            until, ready = time.monotonic() + 60, {worker["pid"]}
            while not ready - {worker["pid"]}:
                assert time.monotonic() < until, log.read_text()[-3000:]
                time.sleep(0.2)
                (state,) = httpx.get(models, trust_env=False).json()
                ready = {each["pid"] for each in state["workers"] if each["status"] == "READY"}
        assert httpx.post(f"{url}{PREDICT}", json=ROW, trust_env=False, timeout=30).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()


def test_a_worker_that_loads_for_nobody_does_not_delay_the_end(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "slow"
    monkeypatch.setenv("SLOW_AFTER", str(flag))
    with serving([archive], tmp_path, "--grace", "40") as server:
        flag.touch()
        (pid,) = server.pids("faulty")
        os.kill(pid, signal.SIGKILL)
        server.until(lambda: server.model("faulty")["status"] == "loading")
        time.sleep(2)
        server.process.send_signal(signal.SIGTERM)
        ends_within(server, 20)


def test_a_worker_that_is_killed_while_it_is_started_ends(tmp_path: Path) -> None:
    async def run() -> str:
        worker = WorkerProcess(tmp_path, 1)
        starting = asyncio.create_task(worker.start())
        await asyncio.sleep(0)
        worker.kill("the server stops at once")
        await starting
        reason = await asyncio.wait_for(worker.ended, 20)
        await worker.stop()
        return reason

    assert asyncio.run(run()) == "the server stops at once"
