"""How many cores a worker may use, so that workers do not fight for them."""

import os
from pathlib import Path
from typing import Literal

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores of this process: its affinity, or fewer where a cgroup quota (v2) allows less; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)
    if _CPU_MAX.exists():
        quota, period, *_ = [*_CPU_MAX.read_text().split(), "0", "0"]
        if quota.isdigit() and int(period) > 0:
            cores = min(cores, max(1, int(quota) // int(period)))
    return max(1, cores)


def threads_for(setting: int | Literal["auto"], workers: int) -> int:
    """Threads of one worker: the setting, or its share of the usable cores.

    Args:
        setting: ``handler.openvino.threads``.
        workers: ``maxWorkers``.
    """
    return setting if isinstance(setting, int) else max(1, usable_cores() // max(1, workers))
