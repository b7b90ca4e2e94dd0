"""Spans of OpenTelemetry for requests, with their phases below them (`handler.openvino.tracing`)."""

import os
from collections.abc import Sequence
from typing import Any

from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.requests.messages import Request, Response
from torchserve_openvino.serving.requests.phases import CallTimes

_HEADERS = ("traceparent", "tracestate")


class Tracing:
    """Sends a span for each request, as a child of the one that its ``traceparent`` names.

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
        self._tracer = provider.get_tracer("torchserve_openvino")
        self._facts = {"openvino.model": model, "openvino.version": version}

    def record(self, call: CallTimes, responses: Sequence[Response] | None) -> None:
        """Sends the spans of a call's requests.

        Args:
            call: Its times; it has ended.
            responses: The responses; None if the call as a whole failed.
        """
        phases = call.spans()
        end = max(end for _, end in phases.values())
        for index, (request, wait) in enumerate(zip(call.requests, call.waits, strict=True)):
            arrived = call.started - int((wait or 0.0) * 1e9)
            status = 500 if responses is None else int(responses[index].status)
            facts = {
                **self._facts, "openvino.request_id": request.id, "openvino.batch_size": len(call.requests),
                "http.response.status_code": status,
            }  # fmt: skip
            span = self._tracer.start_span(
                f"predict {self._facts['openvino.model']}", context=self._parent(request), start_time=arrived,
                kind=self._trace.SpanKind.SERVER, attributes=facts,
            )  # fmt: skip
            if span.is_recording():
                if status >= 500:
                    span.set_status(self._trace.StatusCode.ERROR)
                below = self._trace.set_span_in_context(span)
                times = {"queue": (arrived, call.started), **phases} if wait is not None else phases
                for phase, (begin, finish) in times.items():
                    self._tracer.start_span(phase, context=below, start_time=begin).end(finish)
            span.end(end)

    def _parent(self, request: Request) -> Any:
        headers = {name: value for name in _HEADERS if (value := request.header(name))}
        return self._propagator.extract(headers)


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
