"""Metrics by Prometheus's client."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import prometheus_client

from torchserve_openvino.serving.requests.phases import BOUNDS

logger = logging.getLogger(__name__)


class PrometheusMetrics:
    """Hands metrics to Prometheus's client.

    Args:
        registry: Where they are collected; by default the client's own, which KServe shows at ``/metrics``.
    """

    def __init__(self, registry: prometheus_client.CollectorRegistry = prometheus_client.REGISTRY) -> None:
        self._registry = registry
        # With the kind of each.
        self._metrics: dict[str, tuple[str, Any]] = {}
        self._refused: set[str] = set()
        # What takes a value, by kind, name and labels: finding it in the client takes longer than the value itself.
        self._takers: dict[tuple[Any, ...], Callable[[float], None]] = {}
        self._kinds: dict[str, Any] = {
            "counter": prometheus_client.Counter,
            "gauge": prometheus_client.Gauge,
            "histogram": prometheus_client.Histogram,
        }

    def record(self, kind: str, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Takes one value; see `serving.requests.metric_sink.Record`.

        A value that Prometheus does not allow is dropped, with one warning for its name: handlers name metrics, too.
        """
        key = (kind, name, *labels.items())
        try:
            if (take := self._takers.get(key)) is None:
                take = self._takers[key] = self._taker(kind, name, labels)
            take(value)
        except ValueError as error:
            if name not in self._refused:
                self._refused.add(name)
                logger.warning("Values of the metric %s are dropped: %s", name, error)

    def _taker(self, kind: str, name: str, labels: Mapping[str, str]) -> Callable[[float], None]:
        """Returns what takes values.

        Raises:
            ValueError: The name has another kind, or other labels.
        """
        known, metric = self._metrics.get(name, (kind, None))
        if known != kind:
            raise ValueError(f"it is a {known}, not a {kind}")
        if metric is None:
            more: dict[str, Any] = {"registry": self._registry}
            if kind == "histogram" and name in BOUNDS:
                more["buckets"] = BOUNDS[name]
            metric = self._kinds[kind](name, f"{name} of torchserve-openvino", tuple(labels), **more)
            self._metrics[name] = kind, metric
        # Without labels where it has some, it refuses.
        child = metric.labels(**labels) if labels or metric._labelnames else metric
        taker: Callable[[float], None] = getattr(child, {"counter": "inc", "gauge": "set"}.get(kind, "observe"))
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
                (_, metric), values = self._metrics[name], dict(labels)
                metric.remove(*(values[label] for label in metric._labelnames))
