"""What tests of several rooms share."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def exporter() -> Iterator[Any]:
    """OpenTelemetry's own exporter that keeps spans in memory; a process takes one provider only."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra otel")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    yield kept
    provider.shutdown()
