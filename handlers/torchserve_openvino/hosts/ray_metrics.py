"""Metrics by Ray."""

from collections.abc import Mapping
from typing import Any

from ray.util import metrics as ray_metrics

from torchserve_openvino.serving.requests.phases import BOUNDS, SECONDS


class RayMetrics:
    """Hands metrics to Ray, which adds application, deployment and replica."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}

    def record(self, kind: str, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Takes one value; see `serving.requests.metric_sink.Record`."""
        if (metric := self._metrics.get(name)) is None:
            metric = self._metrics[name] = self._made(kind, name, tuple(labels))
        if kind == "gauge":
            metric.set(value, dict(labels))
        elif kind == "histogram":
            metric.observe(value, dict(labels))
        elif value > 0:
            # Ray refuses an increase by 0.
            metric.inc(value, dict(labels))

    @staticmethod
    def _made(kind: str, name: str, labels: tuple[str, ...]) -> Any:
        if kind == "histogram":
            return ray_metrics.Histogram(name, boundaries=list(BOUNDS.get(name, BOUNDS[SECONDS])), tag_keys=labels)
        return {"gauge": ray_metrics.Gauge, "counter": ray_metrics.Counter}[kind](name, tag_keys=labels)
