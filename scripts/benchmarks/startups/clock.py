"""Splits the time of a process into phases. Imports little, since its own import is measured too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Clock:
    """Nested phases; time counts for the innermost one only, so that they add up to the total.

    Args:
        started: ``now()`` of the parent, just before it started this process.
        now: The clock; by default that of the wall, which processes share.

    Attributes:
        phases: Seconds of each; time outside all phases is `interpreter`.
    """

    def __init__(self, started: float, now: Callable[[], float] = time.time) -> None:
        self.phases: dict[str, float] = {}
        self._now = now
        self._started = self._last = started
        self._open = ["interpreter"]

    @property
    def total(self) -> float:
        """Seconds from the parent's start of this process to the end of the last phase."""
        return self._last - self._started

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside for a phase."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Makes each call of a class's method a phase."""
        plain: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return plain(*args, **kwargs)

        setattr(owner, method, timed)

    def move(self, source: str, target: str, seconds: float) -> None:
        """Moves seconds that were measured elsewhere from one phase to another."""
        self.phases[source] = self.phases.get(source, 0.0) - seconds
        self.phases[target] = self.phases.get(target, 0.0) + seconds

    def _charge(self) -> None:
        now = self._now()
        self.phases[self._open[-1]] = self.phases.get(self._open[-1], 0.0) + now - self._last
        self._last = now
