"""Compiles a model so that it does not need PyTorch's copy of the weights.

A converted model's constants share the tensors' memory, which therefore can't be freed. Here the weights are written to
a private file that OpenVINO maps: what it packs into its own layout stays in memory, and the file's pages are released
to the system, which reads a page again if it is needed.
"""

import ctypes
import logging
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

import openvino as ov

from torchserve_openvino.backend.upstream._openvino_private import core

Compiled = TypeVar("Compiled")


def compile_from_file(model: ov.Model, compile: Callable[[ov.Model], Compiled]) -> Compiled:
    """Compiles a copy of a model whose weights are in a mapped file.

    The file is unlinked afterwards; its content stays mapped, until the process ends at the latest.

    Args:
        model: The converted model.
        compile: Compiles the copy.
    """
    with tempfile.TemporaryDirectory(prefix="torchserve-openvino-") as folder:
        path = Path(folder) / "model.xml"
        ov.save_model(model, path, compress_to_fp16=False)
        compiled = compile(core().read_model(path))
        give_pages_back([path.with_suffix(".bin").resolve()])
    return compiled


# --- releases the memory of mapped files to the system, which reads a page again if it is still needed ------------
# Weights that OpenVINO packed into its own layout stay in memory; the file that they were read from need not.


logger = logging.getLogger(__name__)

# madvise(2), Linux.
_MADV_DONTNEED = 4
_SMAPS = Path("/proc/self/smaps")


def give_pages_back(files: Collection[Path]) -> int:
    """Releases the pages of files that this process has mapped and not written to.

    Args:
        files: Absolute paths, links resolved.

    Returns:
        Number of bytes released; 0 if the system is not Linux.
    """
    if not sys.platform.startswith("linux") or not files:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    names, freed = {str(file) for file in files}, 0
    for first, last, path, facts in _mappings():
        # A page that was written to exists nowhere else.
        if path not in names or facts["Anonymous"]:
            continue
        if libc.madvise(first, last - first, _MADV_DONTNEED):
            logger.warning("madvise on %s failed: errno %d", path, ctypes.get_errno())
        else:
            freed += facts["Rss"]
    return freed


def _mappings() -> Iterator[tuple[int, int, str, dict[str, int]]]:
    """Yields start and end address, file, and bytes by kind, of each memory mapping of this process."""
    first = last = 0
    path, facts = "", {"Rss": 0, "Anonymous": 0}
    for line in _SMAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        head, *rest = line.split(maxsplit=5)
        if not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            path, facts = (rest[4] if len(rest) > 4 else ""), {}
        elif head in {"Rss:", "Anonymous:"}:
            facts[head[:-1]] = int(rest[0]) * 1024
            if len(facts) == 2:
                yield first, last, path.removesuffix(" (deleted)"), facts
