"""What happened to requests, counted: for describe and the metrics, without touching the compile report."""

import threading
from collections import Counter


class Counters:
    """Named counts; safe from several threads.

    Names in use: ``requests``, ``items``, ``padded_rows``, ``padded_dims``, ``split_batches``, ``outside_compiled``,
    ``retried_batches``, and ``refused_NNN`` for each HTTP status that an item got.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Counts."""
        with self._lock:
            self._counts[name] += count

    def reset(self) -> None:
        """Forgets all: what came before READY was no request."""
        with self._lock:
            self._counts.clear()

    def to_dict(self) -> dict[str, int]:
        """All counts so far."""
        with self._lock:
            return dict(sorted(self._counts.items()))
