"""`MetricSink`: where the metrics of a worker go."""

from collections.abc import Callable, Mapping
from typing import Protocol

# Kind (counter, gauge or histogram), name, value, labels.
Record = Callable[[str, str, float, Mapping[str, str]], None]


class MetricSink(Protocol):
    """Takes the metrics of a worker.

    Attributes:
        takes_histograms: Whether each value of a histogram may be recorded; if not, sums are recorded as gauges.
    """

    takes_histograms: bool

    def record(self, kind: str, name: str, value: float, labels: Mapping[str, str], unit: str = "count") -> None:
        """Takes one value.

        Args:
            kind: ``counter``, ``gauge`` or ``histogram``.
            name: The metric's name.
            value: The value; a counter's is what it grew by.
            labels: Labels by name.
            unit: As TorchServe shows it.
        """
