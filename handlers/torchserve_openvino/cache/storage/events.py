"""Counts of a store's events for the report and metrics, with the reasons of the last failures."""

import threading
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Events:
    """Counts since the store was opened; safe to add to from several threads.

    Attributes:
        hits: Entries found.
        misses: Entries that were absent, of another schema, damaged, or that could not be read.
        stored: Entries written.
        damaged: Entries found damaged.
        write_failures: Entries that could not be written, plus one for a folder that cannot be written at all.
        evicted: Entries dropped to keep the size limit.
        lock_waits: Locks that another process held when they were requested.
        lock_timeouts: Locks that were not acquired in time.
        last_damaged: What was wrong with the last damaged entry.
        last_write_failure: Why the last write failed.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    damaged: int = 0
    write_failures: int = 0
    evicted: int = 0
    lock_waits: int = 0
    lock_timeouts: int = 0
    last_damaged: str | None = None
    last_write_failure: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def add(self, name: str, count: int = 1, *, reason: str | None = None) -> None:
        """Adds to a count.

        Args:
            name: Name of a count.
            count: How much to add.
            reason: Stored as the last reason; only for ``damaged`` and ``write_failures``.
        """
        with self._lock:
            setattr(self, name, getattr(self, name) + count)
            if reason is not None:
                setattr(self, {"damaged": "last_damaged", "write_failures": "last_write_failure"}[name], reason)

    def to_dict(self) -> dict[str, Any]:
        """All counts and reasons, JSON-safe."""
        with self._lock:
            return {each.name: getattr(self, each.name) for each in fields(self) if not each.name.startswith("_")}
