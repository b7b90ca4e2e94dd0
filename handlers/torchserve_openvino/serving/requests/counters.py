"""Counts what happens to requests, for describe and the metrics, separately from the compile report."""

import threading
from collections import Counter


class Counters:
    """Named counts; thread-safe.

    Names in use: ``requests``, ``items``, ``padded_rows``, ``padded_dims``, ``split_batches``, ``outside_compiled``,
    ``retried_batches``, and ``refused_NNN`` for each HTTP status that items were refused with.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Adds to a count."""
        with self._lock:
            self._counts[name] += count

    def reset(self) -> None:
        """Resets all counts: what ran before READY was not a request."""
        with self._lock:
            self._counts.clear()

    def to_dict(self) -> dict[str, int]:
        """Returns all counts so far."""
        with self._lock:
            return dict(sorted(self._counts.items()))
