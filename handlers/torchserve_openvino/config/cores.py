"""The cores on which this process may run."""

import os


def allowed_cores() -> int:
    """Returns how many cores this process's affinity allows; where there is none, those of the machine."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)
