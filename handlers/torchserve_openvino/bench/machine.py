"""What a measurement depends on: the processor, the cores, and versions."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
