"""Processor time and memory of a server's process tree."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

MEGABYTE = 1e6


@dataclass(frozen=True)
class Memory:
    """Memory of one process, in MB; `uss` would be freed if it ended, None where the system does not report it."""

    pid: int
    rss: float
    uss: float | None


def tree(root: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(root: int) -> float:
    """User and system time of the tree so far, with that of its ended and reaped processes."""
    total = 0.0
    for process in tree(root):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
            total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total


def busy_seconds() -> float:
    """Processor time of the whole machine so far."""
    times = psutil.cpu_times()._asdict()
    # Guests are counted in user and nice already.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return float(sum(value for key, value in times.items() if key not in idle))


def memory(pids: list[int]) -> list[Memory]:
    """Memory of each process that still runs."""
    result = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            uss = None
            with contextlib.suppress(psutil.AccessDenied, AttributeError):
                uss = process.memory_full_info().uss / MEGABYTE
            result.append(Memory(pid, process.memory_info().rss / MEGABYTE, uss))
    return result
