"""Which input sizes stay symbolic in a graph. Light to import, because a worker that starts warm traces nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OpenAxes:
    """Axes of a model's inputs whose sizes should stay symbolic in its graph.

    If torch can't trace without knowing a size, there is still one graph for each size.

    Attributes:
        axes: Maps the name of an input, or its position, to its axes.
        ones: Whether a size of 1 is treated like any other. If not, it has a graph of its own, which saves the time
            that a graph spends on computing symbolic sizes at each call (about a millisecond for 300 operators).
    """

    axes: Mapping[str | int, tuple[int, ...]]
    ones: bool = True

    def to_plain(self) -> list[Any]:
        """Returns JSON-safe data for a cache key."""
        return [self.ones, sorted([str(name), sorted(axes)] for name, axes in self.axes.items())]
