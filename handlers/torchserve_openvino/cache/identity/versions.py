"""The versions that every entry of the cache depends on."""

import functools
import sys
from importlib import metadata
from pathlib import Path

from torchserve_openvino.cache.identity.code_walk import digest_of_files
from torchserve_openvino.cache.identity.key import FORMAT

# Folders and files of what compiles a model into partitions and runs them, besides the passes: entries name these one
# by one (`passes/digests.py`).
ROOMS = ("backend", "ops", "cache", "quantized", "passes/manager.py")
_ROOT = Path(__file__).resolve().parents[2]


@functools.lru_cache(maxsize=1)
def versions() -> dict[str, str | int]:
    """Returns the versions of the entry format, this package (with a digest of its code), torch and OpenVINO."""
    return {
        "format": FORMAT,
        "package": f"{metadata.version('torchserve-openvino')}+{source_digest(*ROOMS)}",
        "torch": metadata.version("torch"),
        "openvino": metadata.version("openvino"),
    }


@functools.lru_cache(maxsize=8)
def source_digest(*rooms: str) -> str:
    """Returns a digest of the code in subpackages, since the version does not change between two releases.

    Args:
        rooms: Folders and files in the package.

    Raises:
        FileNotFoundError: One of them has no source.
    """
    paths: list[Path] = []
    for room in rooms:
        path = _ROOT / room
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise FileNotFoundError(f"no source in {path}, on which entries of the cache depend; reinstall the package")
        paths += files
    return digest_of_files(_ROOT, paths)


def python_version() -> str:
    """Returns the Python implementation and minor version; byte code differs between minor versions."""
    return f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
