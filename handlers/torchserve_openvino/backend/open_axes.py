"""Which sizes of a model's inputs one graph leaves open. Light to import: a worker that starts warm traces nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OpenAxes:
    """Axes of a model's inputs whose sizes its graph is not to rest on.

    Where torch can't do without a size, there is one graph for each all the same.

    Attributes:
        axes: Name of an input, or its position, to its axes.
        ones: Whether a size of 1 is one like others; else it has a graph of its own, which is faster by what a graph of
            symbolic sizes spends on finding them out at each call (about a millisecond for 300 operators).
    """

    axes: Mapping[str | int, tuple[int, ...]]
    ones: bool = True

    def to_plain(self) -> list[Any]:
        """JSON-safe, for the key of a cache."""
        return [self.ones, sorted([str(name), sorted(axes)] for name, axes in self.axes.items())]
