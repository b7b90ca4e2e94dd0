"""Where a request's time goes: phases, batches, spans, and ids by which a request is found in the log."""

import gzip
import logging
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from serving_worker import ROWS, WARMUP, close, save_weights, sent

from torchserve_openvino import OpenVINOHandler
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.requests.messages import Request, Response
from torchserve_openvino.serving.requests.phases import CallTimes, Histogram, RequestTimes
from torchserve_openvino.serving.requests.tracing import Tracing
from torchserve_openvino.tasks.tensor import TensorHandler

GOOD = [[1.0, 2.0, 3.0, 4.0]]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def started(archive: Any, kind: Any = TensorHandler, **section: Any) -> tuple[Any, Any]:
    made = archive({"handler": {"openvino": {"warmup": WARMUP, **section}}}, weights=save_weights, batch_size=4)
    handler = kind()
    handler.initialize(made.context)
    return made, handler


def times(handler: Any) -> dict[str, Any]:
    return handler.describe_handle()["serving"]["times"]


class Slow(OpenVINOHandler):
    """A handler of a user, whose steps take known times."""

    def preprocess(self, data):
        time.sleep(0.05)
        return torch.tensor([row["body"][0] for row in data])

    def postprocess(self, output):
        time.sleep(0.02)
        return output.tolist()


def test_the_report_says_how_long_each_phase_took_and_why_batches_were_released(archive) -> None:
    made, handler = started(archive, Slow)
    assert times(handler)["seconds"]["decode"]["count"] == 0
    for count in (1, 3, 4, 4):
        answers = made.handle(handler, *[ROWS] * count)
        close(answers[0][:1] if isinstance(answers[0][0], list) else [answers[0]])
    found = times(handler)
    assert found["released"] == {"full": 2, "delay": 1, "only_one": 1}
    assert found["batch_size"]["buckets"] == {"1": 1, "2": 1, "4": 4, "8": 4, "16": 4, "32": 4, "64": 4, "+Inf": 4}
    seconds = found["seconds"]
    assert {phase: each["count"] for phase, each in seconds.items()} == {
        "queue": 0, "decode": 4, "inference": 4, "encode": 4,
    }  # fmt: skip
    assert seconds["decode"]["sum"] >= 4 * 0.05 and seconds["encode"]["sum"] >= 4 * 0.02
    assert 0 < seconds["inference"]["sum"] < 0.2
    assert seconds["decode"]["buckets"]["0.03"] == 0 and seconds["decode"]["buckets"]["+Inf"] == 4


def test_torchserve_gets_them_as_series_once_a_second(archive, caplog, monkeypatch) -> None:
    monkeypatch.setattr("torchserve_openvino.serving.metrics.SECONDS_BETWEEN", 0.0)
    made, handler = started(archive)
    with caplog.at_level(logging.INFO):
        made.handle(handler, ROWS, GOOD)
    buckets = sent(caplog, "openvino_phase_seconds_bucket")
    assert any("phase:decode,le:+Inf,worker:" in labels and value == "1" for value, labels in buckets), buckets
    assert [value for value, _ in sent(caplog, "openvino_batch_size_sum")] == ["2.0"]
    assert {labels.split(",")[0] for _, labels in sent(caplog, "openvino_phase_seconds_count")} == {
        "phase:decode", "phase:inference", "phase:encode",
    }  # fmt: skip
    released = {labels.split(",")[0]: value for value, labels in sent(caplog, "openvino_batches_total")}
    # All of them were sent at 0 before.
    assert released == {"released:delay": "1"}


@pytest.mark.parametrize("form", ["t={:.3f}", "{:.6f}", "{:.0f}000"])
def test_a_wait_is_known_where_a_proxy_says_when_the_request_came(archive, form) -> None:
    made, handler = started(archive)
    for name in ("x-request-start", "X-Request-Start", "X-REQUEST-START"):
        made.handle(handler, ROWS, **{name: form.format(time.time() - 2)})
    made.handle(handler, ROWS, **{"x-request-start": "yesterday"})
    made.handle(handler, ROWS, **{"x-request-start": str(time.time() + 1000)})
    made.handle(handler, ROWS)
    waits = times(handler)["seconds"]["queue"]
    assert waits["count"] == 3 and 3 * 1.0 <= waits["sum"] <= 3 * 4.0


def test_a_refused_request_is_found_in_the_log_by_its_id(archive, caplog, monkeypatch) -> None:
    made, handler = started(archive)
    answers = made.handle(handler, ROWS, [[1.0]])
    assert answers[1]["request_id"] == "request-1" and made.status(1) == 400
    monkeypatch.setattr(TensorHandler, "predict", lambda *_: 1 / 0)
    caplog.clear()
    (answer,) = made.handle(handler, ROWS)
    assert made.status(0) == 500 and answer["request_id"] == "request-0"
    assert any("Request request-0 is answered with 500: the server failed" in r.getMessage() for r in caplog.records)


def test_a_call_without_a_compiled_model_is_decoding(archive) -> None:
    made, handler = started(archive)
    made.handle(handler, b"{not json")
    seconds = times(handler)["seconds"]
    assert (seconds["decode"]["count"], seconds["inference"]["count"]) == (1, 0)


def test_bounds_are_inclusive_and_phases_add_up() -> None:
    histogram = Histogram((1, 2))
    for value in (0, 1, 1.5, 2, 3):
        histogram.add(value)
    assert histogram.to_dict() == {"count": 5, "sum": 7.5, "buckets": {"1": 2, "2": 4, "+Inf": 5}}
    call = CallTimes([Request({})])
    begun = time.perf_counter_ns()
    call.ran(begun, begun + 10_000_000)
    call.ran(begun + 30_000_000, begun + 40_000_000)
    assert call.seconds()["inference"] == pytest.approx(0.02)
    phases = call.spans()
    assert phases["inference"][1] - phases["inference"][0] == 40_000_000
    assert phases["decode"][0] == call.started and phases["decode"][1] == phases["inference"][0]


def test_measuring_allocates_nothing_that_grows_with_a_loop() -> None:
    collected = RequestTimes()
    with collected.call([Request({})], 1, None) as call:
        for number in range(10_000):
            call.ran(number, number + 1)
    assert all(len(kept) <= 1 for kept in vars(call).values() if hasattr(kept, "__len__"))
    assert call.seconds()["inference"] == pytest.approx(1e-5)


# --- spans -----------------------------------------------------------------------------------------------------------


def spans_of(handler: Any, exporter: Any) -> tuple[Any, ...]:
    """What was sent, with the spans that the worker's thread has not made yet."""
    handler._openvino.tracing.flush()
    return exporter.get_finished_spans()


def test_each_request_is_a_span_with_its_phases_below_its_caller_s(archive, exporter) -> None:
    made, handler = started(archive, tracing=True)
    exporter.clear()
    headers = [
        {"explain": "False", "traceparent": PARENT, "x-request-start": f"{time.time() - 1:.6f}"},
        {"explain": "False"},
        {"explain": "False", "TraceParent": PARENT},
    ]
    made.handle_with(handler, [ROWS, [[1.0]], GOOD], headers)
    spans = spans_of(handler, exporter)
    requests = {span.attributes["openvino.request_id"]: span for span in spans if span.name == "predict net"}
    assert sorted(requests) == ["request-0", "request-1", "request-2"]
    for name, status in (("request-0", 200), ("request-1", 400), ("request-2", 200)):
        span = requests[name]
        assert span.attributes["http.response.status_code"] == status and span.attributes["openvino.batch_size"] == 3
        below = [each for each in spans if each.parent is not None and each.parent.span_id == span.context.span_id]
        phases = [each.name for each in below]
        assert phases == (["queue"] if name == "request-0" else []) + ["decode", "inference", "encode"]
        assert all(span.start_time <= each.start_time <= each.end_time <= span.end_time for each in below)
        child = name != "request-1"
        assert (f"{span.context.trace_id:032x}" == PARENT.split("-")[1]) is child
        assert (span.parent is not None) is child
    waited = requests["request-0"]
    assert 0.9e9 < requests["request-1"].start_time - waited.start_time < 3e9


def test_a_batch_that_fails_as_a_whole_has_spans(archive, exporter, monkeypatch) -> None:
    made, handler = started(archive, tracing=True)
    exporter.clear()
    monkeypatch.setattr(TensorHandler, "answer_items", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.handle(handler, ROWS)
    (span,) = [each for each in spans_of(handler, exporter) if each.name == "predict net"]
    assert span.attributes["http.response.status_code"] == 500 and not span.status.is_ok


def test_a_caller_that_is_not_sampled_costs_no_spans(archive, exporter) -> None:
    made, handler = started(archive, tracing=True)
    exporter.clear()
    made.handle(handler, ROWS, traceparent=f"{PARENT[:-2]}00")
    assert spans_of(handler, exporter) == ()


def test_spans_are_made_soon_after_the_call_and_lost_ones_are_said(archive, exporter, monkeypatch, caplog) -> None:
    made, handler = started(archive, tracing=True)
    exporter.clear()
    tracing = handler._openvino.tracing
    with monkeypatch.context() as patched:
        patched.setattr(tracing._propagator, "extract", lambda _: 1 / 0)
        made.handle(handler, ROWS)
        tracing.flush()
    assert "spans of a call are lost" in caplog.text
    # Without being asked, the thread makes those of the next call.
    made.handle(handler, ROWS)
    deadline, names = time.monotonic() + 30, []
    # The phases end before their request does.
    while "predict net" not in names and time.monotonic() < deadline:
        time.sleep(0.05)
        names = [each.name for each in exporter.get_finished_spans()]
    assert names.count("predict net") == 1


def test_calls_that_wait_for_their_spans_are_bounded(exporter, monkeypatch) -> None:
    exporter.clear()
    monkeypatch.setattr(Tracing, "_flush_when_due", lambda _: None)
    tracing = Tracing("net", "1.0")
    for number in range(2100):
        with RequestTimes().call([Request({}, id=str(number))], 1, None) as call:
            pass
        tracing.record(call, [Response("answer")])
    assert len(exporter.get_finished_spans()) >= 2000
    tracing.flush()
    whole = [each for each in exporter.get_finished_spans() if each.name == "predict net"]
    assert sorted(int(each.attributes["openvino.request_id"]) for each in whole) == list(range(2100))


def test_without_the_key_nothing_is_imported_or_sent(archive, exporter) -> None:
    made, handler = started(archive)
    exporter.clear()
    made.handle(handler, ROWS, traceparent=PARENT)
    assert exporter.get_finished_spans() == () and handler._openvino.tracing is None


SENDING = """
import sys
from torchserve_openvino.serving.requests.messages import Request, Response
from torchserve_openvino.serving.requests.phases import RequestTimes
from torchserve_openvino.serving.requests.tracing import Tracing
tracing = Tracing("net", "1.0")
with RequestTimes().call([Request({}, id="seven")], 1, None) as call:
    pass
tracing.record(call, [Response("answer")])
"""


def test_spans_go_where_opentelemetry_s_variables_say() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
    received: list[tuple[str, bytes]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        # Spans are sent at the end of the process at the latest.
        subprocess.run([sys.executable, "-c", SENDING], check=True, timeout=120, env=os.environ | endpoint)
        server.shutdown()
    assert [path for path, _ in received] == ["/v1/traces"]
    assert b"predict net" in received[0][1] and b"seven" in received[0][1] and b"decode" in received[0][1]


def test_the_missing_extra_is_named(archive, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ModelLoadError, match=r"torchserve-openvino\[otel\]"):
        started(archive, tracing=True)
