"""The report as TorchServe metrics; metrics.yaml must name them, or TorchServe drops them."""

from typing import Any

from torchserve_openvino.report import CompileReport

GAUGES = {
    "openvino_coverage_ratio": "coverage",
    "openvino_partitions": "partitions",
    "openvino_graph_breaks": "graph_breaks",
    "openvino_compile_seconds": "compile_seconds",
}


class MetricsEmitter:
    """Sends gauges when the report changed, and counters by what they grew.

    Args:
        report: Of the model that this worker serves.
    """

    def __init__(self, report: CompileReport) -> None:
        self._report = report
        self._revision = -1
        self._sent: dict[str, int] = {}

    def emit(self, metrics: Any) -> None:
        """Sends what changed since the last call.

        Args:
            metrics: ``context.metrics``.
        """
        if self._revision == self._report.revision:
            return
        from ts.metrics.dimension import Dimension
        from ts.metrics.metric_type_enum import MetricTypes

        self._revision = self._report.revision
        summary = self._report.summary
        for name, attribute in GAUGES.items():
            # TorchServe appends to the list it is given, and its default is shared by all callers: a new one each time.
            value = getattr(summary, attribute)
            metrics.add_metric(name, value, unit="count", dimensions=[], metric_type=MetricTypes.GAUGE)
        for kind, count in self._report.fallback_counts().items():
            self._count(metrics, "openvino_fallbacks_total", count, [Dimension("kind", kind)])
        self._count(metrics, "openvino_recompiles_total", summary.recompiles, [])

    def _count(self, metrics: Any, name: str, total: int, dimensions: list[Any]) -> None:
        key = name + "".join(str(dimension.value) for dimension in dimensions)
        grown = total - self._sent.get(key, 0)
        if grown > 0:
            self._sent[key] = total
            metrics.add_counter(name, grown, dimensions=dimensions)
