"""A window against a real HTTP server, whose behavior is known."""

import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from torchserve_openvino.bench.bodies import content_type, read_folder
from torchserve_openvino.bench.client import Plan
from torchserve_openvino.bench.window import Limit, measure
from torchserve_openvino.errors import ConfigError


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    turn = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        # One request at a time, as one worker answers.
        with self.turn:
            time.sleep(body["busy"])
        answer = body.get("answer", "ok").encode()
        self.send_response(body.get("status", 200))
        self.send_header("content-length", str(len(answer)))
        self.send_header("content-type", body.get("kind", "text/plain"))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join()


def plan(url: str, folder: Path, rate: float, seconds: float = 1.5, **body: float | str) -> Plan:
    (folder / "body.json").write_text(json.dumps({"busy": 0.001, **body}))
    bodies = [(str(each.path), each.content_type) for each in read_folder(folder)]
    return Plan(url, bodies, rate, seconds, settle=0.2, clients=2)


def test_a_server_that_keeps_up_holds(url: str, tmp_path: Path) -> None:
    window = measure(plan(url, tmp_path, 40), Limit(1000), None)
    assert window.held and not window.failures and not window.growing
    assert 20 <= len(window.latencies) <= 100
    assert 0 < window.percentile(0.5) < 1000
    assert window.as_json()["requests"] == len(window.latencies)


def test_latencies_count_from_the_time_at_which_a_request_was_due(url: str, tmp_path: Path) -> None:
    # 20 requests/s at 10/s: the last one waits as long as the window. From the time of sending it would be no different
    # here; a client that waits for answers before it sends would see 100 ms at each.
    window = measure(plan(url, tmp_path, 20, 2.0, busy=0.1), Limit(300), None)
    assert window.percentile(0.99) > 800
    assert window.growing
    assert not window.held


def test_failures_are_late_and_named(url: str, tmp_path: Path) -> None:
    window = measure(plan(url, tmp_path, 30, status=503), Limit(1000), None)
    assert not window.held
    assert window.failures == {"503": window.late}
    assert window.as_json()["p99"] is None and math.isinf(window.percentile(0.99))
    assert window.examples[0] == "503: ok"


def test_a_stream_that_ends_with_an_error_failed(url: str, tmp_path: Path) -> None:
    events = 'data: {"text": "a"}\n\ndata: {"error": {"message": "busy"}}\n\n'
    window = measure(plan(url, tmp_path, 30, answer=events, kind="text/event-stream"), Limit(1000), None)
    assert window.failures == {"stream": window.late} and '"busy"' in window.examples[0]
    assert not measure(plan(url, tmp_path, 30, answer=events), Limit(1000), None).failures


def test_a_request_that_misses_two_limits_is_late_once(url: str, tmp_path: Path) -> None:
    streamed = replace(plan(url, tmp_path, 30, busy=0.01), streamed=True)
    window = measure(streamed, Limit(1e-3, first_bytes=1e-3), None)
    assert window.late == len(window.latencies) == len(window.first_bytes)
    failed = measure(replace(plan(url, tmp_path, 30, status=503), streamed=True), Limit(1e-3, first_bytes=1e-3), None)
    assert failed.late == len(failed.latencies) == len(failed.first_bytes)


def test_a_closed_loop_has_the_rate_that_was_answered(url: str, tmp_path: Path) -> None:
    window = measure(plan(url, tmp_path, 0.0, busy=0.02), Limit(), None)
    assert 15 < window.rate <= 51


def test_a_folder_of_requests(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no file"):
        read_folder(tmp_path)
    (tmp_path / "a.jpg").write_bytes(b"x")
    (tmp_path / "b.npy").write_bytes(b"x")
    (tmp_path / ".hidden").write_bytes(b"")
    assert [each.content_type for each in read_folder(tmp_path)] == ["image/jpeg", "application/octet-stream"]
    assert content_type(Path("text.txt")) == "text/plain"
    (tmp_path / "c.json").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"c\.json is empty"):
        read_folder(tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        read_folder(tmp_path / "absent")


@pytest.mark.parametrize("first", ["", 'data: {"text": "a"}\n\n'])
@pytest.mark.parametrize(
    "last",
    ['{"code": 500, "type": "GenerationError", "message": "dead"}', '{"type": "image_generation.error", "n": 1}', "{"],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_stream_that_breaks_off_failed_in_whatever_form(
    url: str, tmp_path: Path, first: str, last: str, streamed: bool
) -> None:
    events = f"{first}data: {last}\n\ndata: [DONE]\n\n"
    asked = replace(plan(url, tmp_path, 30, answer=events, kind="text/event-stream"), streamed=streamed)
    window = measure(asked, Limit(1000), None)
    assert window.failures == {"stream": window.late}


@pytest.mark.parametrize(
    "events", ['data: {"text": "a", "finish_reason": "stop"}\n\ndata: [DONE]\n\n', "data: 3\n\n", ""]
)
def test_a_whole_stream_is_an_answer(url: str, tmp_path: Path, events: str) -> None:
    window = measure(plan(url, tmp_path, 30, answer=events, kind="text/event-stream"), Limit(1000), None)
    assert not window.failures


def test_a_closed_loop_of_slow_answers_has_the_time_until_the_last(url: str, tmp_path: Path) -> None:
    slow = replace(plan(url, tmp_path, 0.0, busy=0.3), clients=8, seconds=0.4, settle=0.0)
    # One at a time: what was sent in 0.4 s takes 2.4 s and more.
    assert measure(slow, Limit(), None).rate < 5
