"""The versions that every entry of the cache depends on."""

import functools
import sys
from importlib import metadata
from pathlib import Path

from blake3 import blake3

from torchserve_openvino.cache.identity.key import FORMAT

# What turns a model into partitions and calls them.
_ROOMS = ("backend", "ops", "cache")


@functools.lru_cache(maxsize=1)
def versions() -> dict[str, str | int]:
    """Format of entries, this package (with a digest of the rooms that matter), torch and OpenVINO."""
    return {
        "format": FORMAT,
        "package": f"{metadata.version('torchserve-openvino')}+{_source_digest()}",
        "torch": metadata.version("torch"),
        "openvino": metadata.version("openvino"),
    }


def _source_digest() -> str:
    """Of this package's own files: between two releases the version does not change."""
    root = Path(__file__).resolve().parents[2]
    found = blake3()
    for room in _ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            found.update(f"{path.relative_to(root)}:{path.stat().st_size};".encode())
            found.update(path.read_bytes())
    return found.hexdigest(length=8)


def python_version() -> str:
    """Byte code changes from one minor version to the next."""
    return f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
