"""What a measurement depends on: the processor, the cores, and versions."""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("torchserve-openvino", "torch", "openvino", "torchserve")


def machine(cores: int) -> dict[str, Any]:
    """Returns the machine and its versions, JSON-safe.

    Args:
        cores: Cores that are used.
    """
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {"processor": _processor(), "cores": cores, "system": platform.platform(), "versions": versions}


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes that further processes may take: of the machine, or of the container where it has a limit.

    Args:
        cgroup: Folder of the container's control group, version 2.
    """
    free = int(psutil.virtual_memory().available)
    limit, used = (_bytes_in(cgroup / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return free
    # Files that were read are dropped before anything is killed.
    return min(free, max(0, limit - used + _statistic(cgroup / "memory.stat", ("inactive_file", "active_file"))))


def _bytes_in(path: Path) -> int | None:
    """Returns the number in a file; None where it is missing or holds a word, as `max`."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _statistic(path: Path, names: Sequence[str]) -> int:
    try:
        pairs = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except OSError:
        return 0
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in names)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
