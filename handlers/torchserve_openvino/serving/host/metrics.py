"""Metrics on other hosts than TorchServe: handlers send them as to its cache, and the host's own library gets them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

# Kind (counter, gauge or histogram), name, value, labels.
Record = Callable[[str, str, float, Mapping[str, str]], None]


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

    def __init__(self, record: Record) -> None:
        self.record = record
        self.request_ids: Any = None

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
        self.record(metric_type.value, name, float(value), {each.name: str(each.value) for each in dimensions or ()})

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
