"""Versions and machine, for the report."""

import functools
import os
import platform
from importlib import metadata


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor()
    return platform.processor()


@functools.lru_cache(maxsize=1)
def _static() -> dict[str, str]:
    packages = ("torch", "openvino", "torchserve", "torchserve-openvino", "numpy")
    return {
        **{name: _version(name) for name in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
    }


def environment() -> dict[str, str | int]:
    """Returns the versions of what results depend on, the CPU's name, and this process's id."""
    return {**_static(), "pid": os.getpid()}
