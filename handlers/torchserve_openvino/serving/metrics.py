"""The report as TorchServe metrics; metrics.yaml must name them, or TorchServe drops them."""

import sys
import threading
import time
from typing import Any

from torchserve_openvino.report import CompileReport
from torchserve_openvino.serving.counters import Counters

GAUGES = {
    "openvino_coverage_ratio": "coverage",
    "openvino_partitions": "partitions",
    "openvino_graph_breaks": "graph_breaks",
    "openvino_compile_seconds": "compile_seconds",
}
COUNTERS = {
    "padded_rows": "openvino_padded_rows_total",
    "padded_dims": "openvino_padded_lengths_total",
    "outside_compiled": "openvino_outside_compiled_total",
    "retried_batches": "openvino_retried_batches_total",
}
# Each metric is a line that TorchServe's frontend parses: requests are counted together for this long.
SECONDS_BETWEEN = 1.0


class MetricsEmitter:
    """Sends gauges when the report changed, and counters by what they grew.

    Args:
        report: Of the model that this worker serves.
        counters: What happened to requests.
    """

    def __init__(self, report: CompileReport, counters: Counters) -> None:
        self._report = report
        self._counters = counters
        self._revision = -1
        self._next = 0.0
        self._sent: dict[str, int] = {}
        # Requests and what runs beside them send both.
        self._lock = threading.Lock()

    def emit(self, metrics: Any, compiles_after_ready: int = 0, violated: bool = False) -> None:
        """Sends what changed since the last call.

        Args:
            metrics: ``context.metrics``.
            compiles_after_ready: Compilations that requests waited for, so far.
            violated: Whether the worker broke its policy.
        """
        with self._lock:
            if self._revision != self._report.revision:
                self._revision = self._report.revision
                self._emit_report(metrics, compiles_after_ready, violated)
                self._emit_shadow(metrics)
            now = time.monotonic()
            if now >= self._next:
                self._next = now + SECONDS_BETWEEN
                self._emit_counts(metrics)

    def _emit_report(self, metrics: Any, compiles_after_ready: int, violated: bool) -> None:
        summary = self._report.summary
        for name, attribute in GAUGES.items():
            self._gauge(metrics, name, getattr(summary, attribute))
        cache = self._report.cache
        for name, value in (("traces", cache.traces), ("compiles", cache.compiles), ("imports", cache.imports)):
            self._gauge(metrics, f"openvino_{name}", value)
        self._count(metrics, "openvino_cache_write_failures_total", cache.write_failures)
        self._gauge(metrics, "openvino_policy_violated", int(violated))
        self._gauge(metrics, "openvino_backend", 1, "backend", self._report.backend)
        for kind, count in self._report.fallback_counts().items():
            self._count(metrics, "openvino_fallbacks_total", count, "kind", kind)
        self._count(metrics, "openvino_recompiles_total", summary.recompiles)
        self._count(metrics, "openvino_compiles_after_ready_total", compiles_after_ready)

    def _emit_shadow(self, metrics: Any) -> None:
        if not (shadow := self._report.shadow):
            return
        for key in ("checked", "mismatches", "skipped"):
            self._count(metrics, f"openvino_shadow_{key}_total", shadow[key], from_zero=True)
        # Prometheus takes an infinite value, TorchServe's parser does not.
        worst = min(float(shadow["worst"]), sys.float_info.max)
        self._gauge(metrics, "openvino_shadow_largest_difference", worst)

    def _emit_counts(self, metrics: Any) -> None:
        for key, count in self._counters.to_dict().items():
            if key in COUNTERS:
                self._count(metrics, COUNTERS[key], count)
            elif key.startswith("refused_"):
                self._count(metrics, "openvino_refused_items_total", count, "code", key.removeprefix("refused_"))

    def _gauge(self, metrics: Any, name: str, value: float, dimension: str = "", kind: str = "") -> None:
        from ts.metrics.dimension import Dimension
        from ts.metrics.metric_type_enum import MetricTypes

        # TorchServe appends to the list it is given, and its default is shared by all callers: a new one each time.
        dimensions = [Dimension(dimension, kind)] if dimension else []
        metrics.add_metric(name, value, unit="count", dimensions=dimensions, metric_type=MetricTypes.GAUGE)

    def _count(
        self, metrics: Any, name: str, total: int, dimension: str = "", value: str = "", from_zero: bool = False
    ) -> None:
        from ts.metrics.dimension import Dimension

        key = f"{name} {value}"
        grown = total - self._sent.get(key, 0)
        # Who watches for a rise needs to see where it began.
        if grown > 0 or (from_zero and key not in self._sent):
            self._sent[key] = total
            metrics.add_counter(name, grown, dimensions=[Dimension(dimension, value)] if dimension else [])
