"""Metrics by Prometheus's client."""

from collections.abc import Callable, Mapping
from typing import Any

import prometheus_client

from torchserve_openvino.serving.requests.phases import BOUNDS


class PrometheusMetrics:
    """Hands metrics to Prometheus's client.

    Args:
        registry: Where they are collected; by default the client's own, which KServe shows at ``/metrics``.
    """

    def __init__(self, registry: prometheus_client.CollectorRegistry = prometheus_client.REGISTRY) -> None:
        self._registry = registry
        self._metrics: dict[str, Any] = {}
        # What takes a value, by kind, name and labels: finding it in the client takes longer than the value itself.
        self._takers: dict[tuple[Any, ...], Callable[[float], None]] = {}
        self._kinds: dict[str, Any] = {
            "counter": prometheus_client.Counter,
            "gauge": prometheus_client.Gauge,
            "histogram": prometheus_client.Histogram,
        }

    def record(self, kind: str, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Takes one value; see `serving.requests.metric_sink.Record`."""
        key = (kind, name, *labels.items())
        if (take := self._takers.get(key)) is None:
            take = self._takers[key] = self._taker(kind, name, labels)
        take(value)

    def _taker(self, kind: str, name: str, labels: Mapping[str, str]) -> Callable[[float], None]:
        if name not in self._metrics:
            more: dict[str, Any] = {"registry": self._registry}
            if kind == "histogram" and name in BOUNDS:
                more["buckets"] = BOUNDS[name]
            self._metrics[name] = self._kinds[kind](name, f"{name} of torchserve-openvino", tuple(labels), **more)
        metric = self._metrics[name].labels(**labels) if labels else self._metrics[name]
        taker: Callable[[float], None] = getattr(metric, {"counter": "inc", "gauge": "set"}.get(kind, "observe"))
        return taker

    def forget(self, label: str, value: str) -> None:
        """Removes gauges of what is gone, such as a worker.

        Args:
            label: A label's name.
            value: Gauges with this value of it are removed.
        """
        for key in [key for key in self._takers if (label, value) in key]:
            kind, name, *labels = key
            del self._takers[key]
            if kind == "gauge":
                metric, values = self._metrics[name], dict(labels)
                metric.remove(*(values[label] for label in metric._labelnames))
