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
        # What takes a value, by name and labels: finding it in the client takes longer than the value itself.
        self._takers: dict[tuple[Any, ...], Callable[[float], None]] = {}
        # Label values of gauges, by the gauge's name.
        self._gauges: dict[str, set[tuple[str, ...]]] = {}
        self._kinds: dict[str, Any] = {
            "counter": prometheus_client.Counter,
            "gauge": prometheus_client.Gauge,
            "histogram": prometheus_client.Histogram,
        }

    def record(self, kind: str, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Takes one value; see `serving.host.metrics.Record`."""
        key = (name, *labels.items())
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
        if kind == "gauge" and labels:
            names = self._metrics[name]._labelnames
            self._gauges.setdefault(name, set()).add(tuple(labels[each] for each in names))
        taker: Callable[[float], None] = getattr(metric, {"counter": "inc", "gauge": "set"}.get(kind, "observe"))
        return taker

    def forget(self, label: str, value: str) -> None:
        """Removes gauges of what is gone, such as a worker.

        Args:
            label: A label's name.
            value: Gauges with this value of it are removed.
        """
        for name, known in self._gauges.items():
            names = self._metrics[name]._labelnames
            gone = {each for each in known if dict(zip(names, each, strict=True)).get(label) == value}
            for each in gone:
                self._metrics[name].remove(*each)
            known.difference_update(gone)
        self._takers = {key: take for key, take in self._takers.items() if (label, value) not in key}
