"""The report as TorchServe metrics; metrics.yaml must name them, or TorchServe drops them."""

import io
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, TextIO

from torchserve_openvino.config.vocabulary import FALLBACK_KINDS
from torchserve_openvino.report import CompileReport
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.requests.metric_sink import MetricSink
from torchserve_openvino.serving.requests.phases import BATCHES, RequestTimes

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
# Statuses with which this package's handlers refuse items: sent from the start, others once they occur.
_REFUSALS = (400, 413, 415, 422, 500, 503, 507)
# TorchServe's frontend parses a line for each metric, so counts are collected for this long before they are sent.
SECONDS_BETWEEN = 1.0


def worker_name(arguments: Sequence[str]) -> str:
    """Returns TorchServe's number of a worker (9000 in W-9000-NAME_VERSION) from its command line; else its pid.

    Args:
        arguments: ``sys.argv``: ``... --sock-type unix --sock-name /tmp/.ts.sock.9000`` or ``... --port 9000``.
    """
    for option, value in itertools.pairwise(arguments):
        if option in {"--sock-name", "--port"} and (number := re.search(r"\d+$", value)):
            return number.group()
    return str(os.getpid())


class WholeLines(io.TextIOBase):
    """Text output that passes on each thread's lines whole.

    TorchServe takes a metric from a line of the worker's output that begins with ``[METRICS]``, and its own
    ``async_service`` prints a line for each request. ``print`` writes a line and its end separately: a metric that
    another thread sends in between would end up in the middle of a line, and be lost.

    Args:
        target: Gets the lines.
    """

    def __init__(self, target: TextIO) -> None:
        self._target = target
        self._begun = threading.local()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The target's."""
        return self._target.encoding

    def write(self, text: str) -> int:
        """Passes on what is complete, and keeps the rest for this thread's next call."""
        whole, end, rest = (getattr(self._begun, "text", "") + text).rpartition("\n")
        self._begun.text = rest
        if end:
            self._target.write(whole + end)
        return len(text)

    def flush(self) -> None:
        """Passes on this thread's line, complete or not."""
        if begun := getattr(self._begun, "text", ""):
            self._begun.text = ""
            self._target.write(begun)
        self._target.flush()

    def isatty(self) -> bool:
        """Returns the target's."""
        return self._target.isatty()

    def fileno(self) -> int:
        """Returns the target's."""
        return self._target.fileno()

    def writable(self) -> bool:
        """Returns True."""
        return True


def keep_metrics_apart() -> None:
    """Lets no thread's ``print`` tear the lines in which metrics reach TorchServe."""
    if not isinstance(sys.stdout, WholeLines):
        sys.stdout = WholeLines(sys.stdout)


class MetricsEmitter:
    """Sends gauges when the report has changed, and counters by their increments.

    Args:
        report: The report of the model that this worker serves.
        counters: Counts of what happened to requests.
        version: The model's version.
        times: Where the time of requests went; None sends nothing of it.
    """

    def __init__(
        self, report: CompileReport, counters: Counters, version: str = "", times: RequestTimes | None = None
    ) -> None:
        self._times = times
        self._sent_times: dict[Any, float] = {}
        # Gauges of different workers must not overwrite each other.
        self._labels = {"worker": worker_name(sys.argv), "version": version or "default"}
        self._report = report
        self._counters = counters
        self._revision = -1
        self._next = 0.0
        self._sent: dict[str, int] = {}
        # One that no kernel has any more is sent as 0.
        self._precisions: set[str] = set()
        # Requests and the thread of shadow verification both send metrics.
        self._lock = threading.Lock()

    def emit(self, metrics: MetricSink, compiles_after_ready: int = 0, violated: bool = False) -> None:
        """Sends what changed since the last call.

        Args:
            metrics: Takes them.
            compiles_after_ready: Compilations that requests waited for, so far.
            violated: Whether the worker broke its policy.
        """
        with self._lock:
            if self._revision != self._report.revision:
                self._revision = self._report.revision
                self._emit_report(metrics, compiles_after_ready, violated)
                self._emit_shadow(metrics)
            now = time.monotonic()
            # Other hosts than TorchServe have no lines to parse; the last counts of a worker must not be lost there.
            if metrics.takes_histograms or now >= self._next:
                self._next = now + SECONDS_BETWEEN
                self._emit_counts(metrics)
                if self._times is not None:
                    self._emit_times(metrics, self._times)

    def _emit_report(self, metrics: MetricSink, compiles_after_ready: int, violated: bool) -> None:
        summary = self._report.summary
        for name, attribute in GAUGES.items():
            self._gauge(metrics, name, getattr(summary, attribute))
        cache = self._report.cache
        for name, value in (("traces", cache.traces), ("compiles", cache.compiles), ("imports", cache.imports)):
            self._gauge(metrics, f"openvino_{name}", value)
        self._count(metrics, "openvino_cache_write_failures_total", cache.write_failures)
        self._gauge(metrics, "openvino_policy_violated", int(violated))
        self._gauge(metrics, "openvino_verified", int(self._report.verified))
        self._gauge(metrics, "openvino_backend", 1, "backend", self._report.backend)
        shares = self._report.precisions()
        self._precisions |= shares.keys()
        for precision in sorted(self._precisions):
            self._gauge(metrics, "openvino_time_ratio", shares.get(precision, 0.0), "precision", precision)
        counts = self._report.fallback_counts()
        for kind in FALLBACK_KINDS:
            self._count(metrics, "openvino_fallbacks_total", counts.get(kind, 0), "kind", kind)
        self._count(metrics, "openvino_recompiles_total", summary.recompiles)
        self._count(metrics, "openvino_compiles_after_ready_total", compiles_after_ready)

    def _emit_shadow(self, metrics: MetricSink) -> None:
        shadow = self._report.tracker.verify.shadow
        for key in ("checked", "mismatches", "skipped"):
            self._count(metrics, f"openvino_shadow_{key}_total", shadow.get(key, 0))
        if not shadow:
            return
        # Prometheus takes an infinite value, TorchServe's parser does not.
        worst = min(float(shadow["worst"]), sys.float_info.max)
        self._gauge(metrics, "openvino_shadow_largest_difference", worst)

    def _emit_counts(self, metrics: MetricSink) -> None:
        counts = self._counters.to_dict()
        for key, name in COUNTERS.items():
            self._count(metrics, name, counts.get(key, 0))
        refused = {f"refused_{code}": 0 for code in _REFUSALS} | {k: n for k, n in counts.items() if _is_refusal(k)}
        for key, count in refused.items():
            self._count(metrics, "openvino_refused_items_total", count, "code", key.removeprefix("refused_"))

    def _emit_times(self, metrics: MetricSink, times: RequestTimes) -> None:
        """Sends counts; to TorchServe also histograms as Prometheus' series: its own take a line for each value."""
        series = {} if metrics.takes_histograms else times.series()
        for (name, labels), value in series.items():
            if self._sent_times.get((name, labels)) != value:
                self._sent_times[name, labels] = value
                metrics.record("gauge", name, value, {**dict(labels), **self._labels}, _unit(name))
        for release, count in times.released.items():
            self._count(metrics, BATCHES, count, "released", release)

    def _gauge(self, metrics: MetricSink, name: str, value: float, dimension: str = "", kind: str = "") -> None:
        labels = {dimension: kind, **self._labels} if dimension else self._labels
        metrics.record("gauge", name, value, labels, _unit(name))

    def _count(self, metrics: MetricSink, name: str, total: int, dimension: str = "", value: str = "") -> None:
        key = f"{name} {value}"
        grown = total - self._sent.get(key, 0)
        # Each counter is sent once at 0, so that monitoring sees its first increase.
        if grown > 0 or key not in self._sent:
            self._sent[key] = total
            metrics.record("counter", name, grown, {dimension: value} if dimension else {})


def _unit(name: str) -> str:
    return "seconds" if name.endswith(("_seconds", "_seconds_sum")) else "count"


def _is_refusal(name: str) -> bool:
    return name.startswith("refused_")
