"""Whether other processes took the cores while something was timed."""

import time
from pathlib import Path

# Of a process that has its cores for itself, threads wait for each other by less than this.
BUSY = 0.3
_TASKS = Path("/proc/self/task")


class Contention:
    """Measures how long this process's threads wait for a core; begins with its creation."""

    def __init__(self) -> None:
        self._start, self._waited = time.perf_counter(), _seconds_waited()

    def share(self) -> float:
        """Returns the seconds that threads have waited, all of them together, for each second; 0 if it is not known."""
        elapsed = time.perf_counter() - self._start
        return max(0.0, _seconds_waited() - self._waited) / elapsed if elapsed else 0.0


def _seconds_waited() -> float:
    """Returns the threads' time in the scheduler's queue (Linux' ``schedstat``, whose second number is in ns)."""
    total = 0
    for task in _TASKS.glob("*/schedstat"):
        try:
            total += int(task.read_text().split()[1])
        except (OSError, IndexError, ValueError):
            # The thread has ended, or the kernel does not count.
            continue
    return total / 1e9
