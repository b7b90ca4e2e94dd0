"""Metrics by Prometheus's client."""

from collections.abc import Mapping
from typing import Any

import prometheus_client

from torchserve_openvino.serving.requests.phases import BOUNDS


class PrometheusMetrics:
    """Hands metrics to Prometheus's client, whose registry KServe shows at ``/metrics``."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._kinds: dict[str, Any] = {
            "counter": prometheus_client.Counter,
            "gauge": prometheus_client.Gauge,
            "histogram": prometheus_client.Histogram,
        }

    def record(self, kind: str, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Takes one value; see `serving.host.metrics.Record`."""
        if name not in self._metrics:
            more = {"buckets": BOUNDS[name]} if kind == "histogram" and name in BOUNDS else {}
            self._metrics[name] = self._kinds[kind](name, f"{name} of torchserve-openvino", tuple(labels), **more)
        metric = self._metrics[name].labels(**labels) if labels else self._metrics[name]
        getattr(metric, {"counter": "inc", "gauge": "set"}.get(kind, "observe"))(value)
