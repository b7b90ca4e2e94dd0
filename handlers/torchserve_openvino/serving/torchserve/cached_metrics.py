"""Metrics in TorchServe's cache; on other hosts, handlers send them as to it, and the host's library gets them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torchserve_openvino.serving.requests.metric_sink import MetricSink, Record


def metrics_of(context: Any) -> MetricSink | None:
    """Returns what takes metrics behind a context; None if nothing does, or only TorchServe's older metrics store."""
    metrics = getattr(context, "metrics", None)
    if metrics is None or isinstance(metrics, HostMetrics):
        return metrics
    # Imported here: other hosts have no TorchServe.
    from ts.metrics.metric_cache_abstract import MetricCacheAbstract

    return CachedMetrics(metrics) if isinstance(metrics, MetricCacheAbstract) else None


class CachedMetrics:
    """Puts metrics into TorchServe's cache.

    Args:
        cache: ``context.metrics`` of a worker.
    """

    # Its parser takes a line for each value of a histogram.
    takes_histograms = False

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        # Metrics without labels of ours, with the text of the dimensions that TorchServe adds. Looking both up anew
        # takes longer than all else that is done for a value.
        self._known: dict[tuple[str, str, str], tuple[Any, str]] = {}

    def record(self, kind: str, name: str, value: float, labels: Mapping[str, str], unit: str = "count") -> None:
        """Takes one value; see `MetricSink`."""
        requests = self._cache.request_ids
        if not labels and requests and (known := self._known.get((kind, name, unit))) is not None:
            metric, text = known
            metric.emit_metrics(",".join(requests.values()), value, text)
            return
        # Imported here: other hosts have no TorchServe.
        from ts.metrics.dimension import Dimension
        from ts.metrics.metric_type_enum import MetricTypes

        # TorchServe appends to the list it is given, and all callers share its default: pass a new list each time.
        dimensions = [Dimension(label, value) for label, value in labels.items()]
        metric_type = MetricTypes(kind)
        self._cache.add_metric(name, value, unit=unit, dimensions=dimensions, metric_type=metric_type)
        if not labels and requests:
            metric = self._cache.get_metric(name, metric_type)
            # Otherwise TorchServe logs what is wrong with it, each time.
            if [dimension.name for dimension in dimensions] == metric.dimension_names:
                self._known[kind, name, unit] = metric, ",".join(map(str, dimensions))


@dataclass(frozen=True)
class Dimension:
    """A label of a metric."""

    name: str
    value: str


class MetricTypes(Enum):
    """Kinds of metrics, named as TorchServe names them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class HostMetrics:
    """Takes metrics by the methods of TorchServe's ``MetricsCacheYamlImpl``.

    Args:
        record: Gets each value. A counter's is what it grew by.
    """

    takes_histograms = True

    def __init__(self, record: Record) -> None:
        self._record = record
        self.request_ids: Any = None

    def record(self, kind: str, name: str, value: float, labels: Mapping[str, str], unit: str = "count") -> None:
        """Takes one value; see `MetricSink`. Units are in the names."""
        self._record(kind, name, value, labels)

    def set_request_ids(self, request_ids: Any) -> None:
        """Does nothing but keep them: metrics of this package have no request's id."""
        self.request_ids = request_ids

    def add_metric(
        self,
        name: str,
        value: float,
        unit: str = "count",
        idx: Any = None,
        dimensions: Sequence[Any] | None = None,
        metric_type: Any = MetricTypes.COUNTER,
    ) -> None:
        """Takes one value; dimensions and kind may also be TorchServe's own objects."""
        self._record(
            metric_type.value,
            name,
            float(value),
            {dimension.name: str(dimension.value) for dimension in dimensions or ()},
        )

    def add_counter(self, name: str, value: float, idx: Any = None, dimensions: Sequence[Any] | None = None) -> None:
        """Takes what a counter grew by."""
        self.add_metric(name, value, dimensions=dimensions)

    def add_time(
        self, name: str, value: float, idx: Any = None, unit: str = "ms", dimensions: Sequence[Any] | None = None
    ) -> None:
        """Takes a time, as a gauge."""
        self.add_metric(name, value, unit, idx, dimensions, MetricTypes.GAUGE)

    add_size = add_percent = add_time

    def add_error(self, name: str, value: Any, dimensions: Sequence[Any] | None = None) -> None:
        """Counts an error."""
        self.add_metric(name, 1, dimensions=dimensions)
