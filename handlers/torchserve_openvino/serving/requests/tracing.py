"""Spans of OpenTelemetry for requests, with their phases below them (`handler.openvino.tracing`)."""

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.requests.messages import Response
from torchserve_openvino.serving.requests.phases import CallTimes

logger = logging.getLogger(__name__)

_HEADERS = ("traceparent", "tracestate")
# How long the end of a process waits for its spans to be sent.
_SEND_MILLISECONDS = 2000
# How long calls are collected before their spans are made.
_SECONDS = 0.1
# Calls that may wait for their spans; those of OpenTelemetry's own queue are as many.
_MOST_CALLS = 2048


class _Traced(NamedTuple):
    """What the span of a request takes from it; its body is not kept."""

    id: str
    headers: dict[str, str]
    wait: float | None
    status: int


class _Call(NamedTuple):
    """A call that has ended."""

    started: int
    phases: dict[Any, tuple[int, int]]
    requests: list[_Traced]


class Tracing:
    """Sends a span for each request, as a child of the one that its ``traceparent`` names.

    Spans are made by a thread, those of many calls at a time: made in the call, which leaves the processor's caches to
    its model, they would take four times as long, and the next request would wait for them.

    An application that has set a provider keeps it. Otherwise spans go to where OpenTelemetry's own variables
    (``OTEL_EXPORTER_OTLP_ENDPOINT`` and others) say, by OTLP over HTTP.

    Args:
        model: The model's name.
        version: Its version.

    Raises:
        ModelLoadError: OpenTelemetry is not installed.
    """

    def __init__(self, model: str, version: str) -> None:
        try:
            # Imported here: the extra `otel` is for those who set the key.
            from opentelemetry import trace
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise _missing(error) from error
        provider = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):
            provider = _exporting(model)
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._provider, self._tracer = provider, provider.get_tracer("torchserve_openvino")
        self._facts = {"openvino.model": model, "openvino.version": version}
        self._calls: deque[_Call] = deque()
        self._due, self._lock = threading.Event(), threading.Lock()
        # Before the provider's own, which was registered earlier.
        atexit.register(self.flush)
        threading.Thread(target=self._flush_when_due, name="spans", daemon=True).start()

    def record(self, call: CallTimes, responses: Sequence[Response] | None) -> None:
        """Takes the times of a call, for the spans of its requests.

        Args:
            call: Its times; it has ended.
            responses: The responses; None if the call as a whole failed.
        """
        statuses = [500] * len(call.requests) if responses is None else [int(each.status) for each in responses]
        requests = [
            _Traced(request.id, {name: value for name in _HEADERS if (value := request.header(name))}, wait, status)
            for request, wait, status in zip(call.requests, call.waits, statuses, strict=True)
        ]
        self._calls.append(_Call(call.started, call.spans(), requests))
        if len(self._calls) > _MOST_CALLS:
            self.flush()
        elif not self._due.is_set():
            self._due.set()

    def flush(self) -> None:
        """Makes the spans of all calls that have ended."""
        with self._lock:
            while self._calls:
                try:
                    self._make_spans(self._calls.popleft())
                except Exception:
                    # No answer is lost by spans that are.
                    logger.warning("The spans of a call are lost", exc_info=True)

    def send(self) -> None:
        """Sends the spans of all calls that have ended, and waits for that some seconds at most."""
        self.flush()
        self._provider.force_flush(_SEND_MILLISECONDS)

    def _flush_when_due(self) -> None:
        while self._due.wait():
            time.sleep(_SECONDS)
            self._due.clear()
            self.flush()

    def _make_spans(self, call: _Call) -> None:
        end = max(end for _, end in call.phases.values())
        for request in call.requests:
            arrived = call.started - int((request.wait or 0.0) * 1e9)
            facts = {
                **self._facts, "openvino.request_id": request.id, "openvino.batch_size": len(call.requests),
                "http.response.status_code": request.status,
            }  # fmt: skip
            span = self._tracer.start_span(
                f"predict {self._facts['openvino.model']}", context=self._propagator.extract(request.headers),
                start_time=arrived, kind=self._trace.SpanKind.SERVER, attributes=facts,
            )  # fmt: skip
            if span.is_recording():
                if request.status >= 500:
                    span.set_status(self._trace.StatusCode.ERROR)
                below = self._trace.set_span_in_context(span)
                queue = {} if request.wait is None else {"queue": (arrived, call.started)}
                for phase, (begin, finish) in (queue | call.phases).items():
                    self._tracer.start_span(phase, context=below, start_time=begin).end(finish)
            span.end(end)


def _exporting(model: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise _missing(error) from error
    # What is named here would win over the variable.
    name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": model}
    provider = TracerProvider(resource=Resource.create(name))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _missing(error: ImportError) -> ModelLoadError:
    return ModelLoadError(
        f"handler.openvino.tracing needs OpenTelemetry ({error}): pip install 'torchserve-openvino[otel]'."
    )
