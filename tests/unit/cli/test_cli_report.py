import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from torchserve_openvino.cli import app
from torchserve_openvino.cli.reports.readiness import ServerAddress, not_ready
from torchserve_openvino.cli.reports.source import find_report
from torchserve_openvino.report import CompileReport
from torchserve_openvino.report.records import GraphRecord, PartitionRecord
from torchserve_openvino.report.saved import save
from torchserve_openvino.report.tracker import Tracker


@pytest.fixture(autouse=True)
def _no_saved_reports(tmp_path, monkeypatch) -> None:
    """Workers of other tests save theirs in the folder that all tests share."""
    monkeypatch.setenv("TORCHSERVE_OPENVINO_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def report() -> dict[str, Any]:
    tracker = Tracker()
    tracker.config.update(effective_device="CPU", effective_precision="f32")
    graph = tracker.add_graph(GraphRecord("0/0", "net.py:3 (forward)", "inference", ops_total=4))
    graph.partitions.append(PartitionRecord("p0", 3, convert_seconds=0.25, constants=2, constant_bytes=3_000_000))
    reason = "disabled by [the] option"
    tracker.add_fallback("disabled_op", "aten.relu.default", to="eager", reason=reason, where="net.py:5")
    tracker.add_fallback("graph_break", "python", reason="data-dependent branch", where="net.py:7")
    tracker.add_recompile("net.py:3", "size mismatch", "0/1")
    tracker.add_note("a remark")
    return CompileReport(tracker).to_dict() | {"pid": 4711}


def described(metadata: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"modelName": "net", "modelVersion": "1.0", "workers": [], "customizedMetadata": metadata, **more}]


class Server:
    """A stand-in for TorchServe's management API."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.asked: list[tuple[str, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append((self.path, self.headers.get("Authorization")))
                known = outer.answers.get(self.path) or outer.answers.get(self.path.partition("?")[0])
                code, body = known or (404, {"code": 404, "type": "ModelNotFoundException", "message": "Not found."})
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(code)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    runner = CliRunner()
    return lambda *args: runner.invoke(app, ["report", *map(str, args)])


@pytest.mark.parametrize("wrap", [lambda r: r, json.dumps, lambda r: [r], lambda r: json.dumps([r])])
def test_by_name_in_every_wrapping(run, server, report, wrap):
    server.answers["/models/net"] = (200, described(wrap(report)))
    result = run("net", "--management", server.url)
    assert result.exit_code == 0, result.stderr
    assert server.asked == [("/models/net", None), ("/models/net?customized=true", None)]
    shown = result.stdout
    assert "Compile report of net 1.0" in shown
    assert "75.0% (3 of 4 operators on OpenVINO)" in shown
    for text in ("disabled by [the] option", "net.py:5", "data-dependent branch", "size mismatch", "p0", "4711"):
        assert text in shown
    assert "note: a remark" in shown
    assert "\x1b[" not in shown


def test_by_url_and_as_json(run, server, report):
    server.answers["/models/net/1.0"] = (200, described(report))
    result = run(f"{server.url}/models/net/1.0", "--json")
    assert json.loads(result.stdout) == report
    assert run("net/1.0", "--management", f"{server.url}/", "--json").exit_code == 0


def test_a_clean_report_says_none(run, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(CompileReport(Tracker()).to_dict()), encoding="utf-8")
    shown = run(path).stdout
    for title in ("Fallbacks: none", "Graph breaks: none", "Recompiles: none", "Graphs: none"):
        assert title in shown


@pytest.mark.parametrize("wrap", [lambda r: r, described])
def test_from_a_file(run, tmp_path, report, wrap):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(wrap(report)), encoding="utf-8")
    assert "75.0%" in run(path).stdout
    assert json.loads(run(path, "--json").stdout) == report


def test_a_report_of_another_version(run, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(
        '{"schema": 9, "summary": {}, "graphs": [3], "fallbacks": ["x", {"kind": "new"}]}', encoding="utf-8"
    )
    result = run(path)
    assert result.exit_code == 0
    assert "new" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not a JSON file"), ("{}", "contains no compile report"), ("3", "contains no compile report")],
)
def test_a_file_without_a_report(run, tmp_path, text, message):
    path = tmp_path / "report.json"
    path.write_text(text, encoding="utf-8")
    result = run(path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert "cannot be read" in run(tmp_path / "absent.json").stderr


def test_a_server_that_is_down(run, server):
    server.close()
    result = run("net", "--management", server.url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"no server answers at {server.url}" in result.stderr
    assert "--url" in result.stderr


def test_an_unknown_model(run, server):
    server.answers["/models"] = (200, {"models": [{"modelName": "efficientnet", "modelUrl": "e.mar"}]})
    result = run("eficientnet", "--management", server.url)
    assert result.exit_code == 1
    assert "has no model 'eficientnet'" in result.stderr
    assert "Did you mean 'efficientnet'?" in result.stderr


@pytest.mark.parametrize("metadata", [None, "", {}])
def test_another_handler(run, server, metadata):
    server.answers["/models/net"] = (200, described(metadata))
    result = run("net", "--management", server.url)
    assert result.exit_code == 1
    assert "is served by another handler" in result.stderr


def test_a_handler_that_answers_something_else(run, server):
    server.answers["/models/net"] = (200, described("Describe failed: boom"))
    assert "boom" in run("net", "--management", server.url).stderr


def test_a_worker_that_is_not_ready(run, server):
    server.answers["/models/net"] = (200, described("", workers=[{"status": "UNLOADING"}]))
    error = run("net", "--management", server.url).stderr
    assert "no worker of 'net' is READY" in error and "torchserve-openvino why net" in error
    # No worker was asked, which would answer after its load.
    assert [path for path, _ in server.asked] == ["/models/net"]


@pytest.fixture
def saved(tmp_path, monkeypatch, report):
    monkeypatch.setenv("TORCHSERVE_OPENVINO_STATE_DIR", str(tmp_path))
    return lambda cause="": save(tmp_path, "net", "1.0", report, cause)


def test_the_last_report_of_a_model_that_is_not_served(run, server, saved):
    saved("VerificationError: answers differ")
    server.answers["/models/net"] = (200, described("", workers=[{"status": "UNLOADING", "pid": 7}]))
    result = run("net", "--management", server.url)
    assert result.exit_code == 1 and "75.0%" in result.stdout
    assert "refused the model: VerificationError: answers differ" in " ".join(result.stdout.split())
    assert "torchserve-openvino why net" in result.stdout
    server.close()
    result = run("net", "--management", server.url, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["saved"]["cause"].startswith("VerificationError")


def test_the_last_report_of_a_model_without_workers(run, server, saved):
    saved("VerificationError: answers differ")
    server.answers["/models/net"] = (200, described("", workers=[]))
    server.answers["/models/net?customized=true"] = (503, {"message": "no worker to serve describe request."})
    result = run("net", "--management", server.url)
    assert result.exit_code == 1 and "75.0%" in result.stdout and "why net" in result.stdout


def test_the_last_report_of_a_worker_that_does_not_answer(run, server, saved):
    saved()
    workers = [{"status": "READY", "pid": os.getpid()}]
    server.answers["/models/net"] = (200, described("", workers=workers))
    server.answers["/models/net?customized=true"] = (500, {"message": "Worker died."})
    result = run("net", "--management", server.url)
    assert result.exit_code == 0 and "75.0%" in result.stdout and "Worker died." in result.stdout
    # Another server's worker of the same name.
    workers[0]["pid"] = 7
    result = run("net", "--management", server.url)
    assert result.exit_code == 1 and "Worker died." in result.stderr and "why net" in result.stderr


def test_a_token(run, server, report):
    refusal = {"code": 400, "type": "InvalidKeyException", "message": "Token Authorization failed."}
    server.answers["/models/net"] = (400, refusal)
    result = run("net", "--management", server.url)
    assert result.exit_code == 1
    assert "--token" in result.stderr
    server.answers["/models/net"] = (200, described(report))
    assert run("net", "--management", server.url, "--token", "abc").exit_code == 0
    assert server.asked[-1][1] == "Bearer abc"


def test_other_answers(run, server):
    server.answers["/models/net"] = (500, "oops")
    assert "answered 500: oops" in run("net", "--management", server.url).stderr
    server.answers["/models/net"] = (200, "<html>")
    assert "did not answer in JSON" in run("net", "--management", server.url).stderr


@pytest.mark.parametrize("url", ["ftp://x/models/net", "http://", "http://127.0.0.1:1", "http://127.0.0.1:1/models/"])
def test_what_is_no_models_url(run, url):
    result = run(url)
    assert result.exit_code == 1
    assert "/models/NAME" in result.stderr


@pytest.mark.parametrize("answer", [None, 3, "x", '"x"', [], [None], {"customizedMetadata": [3]}])
def test_nothing_to_find(answer):
    assert find_report(answer) is None


def test_an_unknown_version_suggests_no_other_model(run, server):
    server.answers["/models"] = (200, {"models": [{"modelName": "net", "modelUrl": "net.mar"}]})
    result = run("net/9.9", "--management", server.url)
    assert result.exit_code == 1
    assert "Did you mean" not in result.stderr


def test_every_worker_is_shown_where_there_are_several(run, tmp_path) -> None:
    common = {"summary": {"coverage": 0.5, "precision": "f32"}, "verified": True, "counts": {"requests": 7}}
    workers = [
        {"pid": pid, "worker": name, "fallbacks": {"graph_break": pid}, "policy": {"holds": pid == 11}, **common}
        for pid, name in ((11, "9000"), (12, "9001"))
    ]
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"schema": 1, "summary": {"coverage": 1.0}, "workers": workers}))
    text = run(path).stdout
    for word in ("Workers", "9000", "9001", "graph_break 12", "violated", "holds", "50.0%"):
        assert word in text, text
    path.write_text(json.dumps({"schema": 1, "summary": {"coverage": 1.0}, "workers": workers[:1]}))
    assert "Workers" not in run(path).stdout


def test_several_shapes_are_told_apart_in_few_rows(run, tmp_path) -> None:
    tracker = Tracker()
    for rows in (1, 2, 4, 8):
        graph = tracker.add_graph(GraphRecord("0/0", "net.py:3 (forward)", "inference", 4, inputs=[f"[{rows}, 3]"]))
        graph.partitions.append(PartitionRecord("p0", 4, compile_seconds=0.25, constants=2, constant_bytes=3_000_000))
    tracker.graphs[2].partitions[0].runs_on = "eager"
    tracker.graphs[3].dynamic = True
    path = tmp_path / "report.json"
    path.write_text(json.dumps(CompileReport(tracker).to_dict()), encoding="utf-8")
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in run(path).stdout.splitlines() if "│" in line]
    assert [row[3] for row in lines if row[1:2] == ["net.py:3 (forward)"]] == [
        "[1, 3]",
        "[2, 3]",
        "[4, 3]",
        "[8, 3] (dynamic)",
    ]
    partitions = {row[0]: row for row in lines if len(row) > 1 and row[1] == "p0"}
    assert partitions["0-1, 3"][7] == "0.75" and partitions["2"][2] == "eager"


def test_a_report_that_was_saved_here_is_not_that_of_another_machine(run, server, saved) -> None:
    saved()
    server.close()
    assert "saved at" in run("net", "--management", server.url).output
    elsewhere = run("net", "--management", "http://192.0.2.1:8081", "--timeout", "0.5")
    assert elsewhere.exit_code == 1 and "saved at" not in elsewhere.output


def test_workers_that_do_not_say_their_states_are_asked(run, server, report) -> None:
    """Ray Serve answers with a replica's report, with or without `customized`."""
    server.answers["/models/net"] = 200, {**report, "workers": [{"pid": 4711, "requests": 3}]}
    assert run("net", "--management", server.url).exit_code == 0
    where = ServerAddress(server.url, server.url)
    assert "no worker is READY" not in not_ready(where, "net", 5)
