"""The versions that every entry of the cache depends on."""

import functools
import sys
from importlib import metadata
from pathlib import Path

from blake3 import blake3

from torchserve_openvino.cache.identity.key import FORMAT

# Subpackages that compile a model into partitions and run them.
_ROOMS = ("backend", "ops", "cache", "passes")
_ROOT = Path(__file__).resolve().parents[2]


@functools.lru_cache(maxsize=1)
def versions() -> dict[str, str | int]:
    """Returns the versions of the entry format, this package (with a digest of its sources), torch and OpenVINO."""
    return {
        "format": FORMAT,
        "package": f"{metadata.version('torchserve-openvino')}+{source_digest(*_ROOMS)}",
        "torch": metadata.version("torch"),
        "openvino": metadata.version("openvino"),
    }


@functools.lru_cache(maxsize=8)
def source_digest(*rooms: str) -> str:
    """Returns a digest of the source files in subpackages, since the version does not change between two releases."""
    found = blake3()
    for room in rooms:
        for path in sorted((_ROOT / room).rglob("*.py")):
            found.update(f"{path.relative_to(_ROOT)}:{path.stat().st_size};".encode())
            found.update(path.read_bytes())
    return found.hexdigest(length=8)


def python_version() -> str:
    """Returns the Python implementation and minor version; byte code differs between minor versions."""
    return f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
