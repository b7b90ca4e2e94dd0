"""A compiled model that does not need PyTorch's copy of the weights.

A converted model's constants share the tensors' memory, so that this memory can't be freed. Here they go through a
private file that OpenVINO maps instead: what it packed into its own layout stays in memory, and pages of the file that
it does not need any more are given back to the system, which reads them again if it must.
"""

import ctypes
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import openvino as ov

from torchserve_openvino.backend._openvino_private import core

logger = logging.getLogger(__name__)

# madvise(2), Linux: the pages are clean copies of a file's, and come back from it when touched.
_MADV_DONTNEED = 4

Compiled = TypeVar("Compiled")


def compile_from_file(model: ov.Model, compile: Callable[[ov.Model], Compiled]) -> Compiled:
    """Compiles a copy of a model whose weights lie in a file.

    The file has no name afterwards, and goes with the process.

    Args:
        model: The converted model.
        compile: Compiles the copy.
    """
    with tempfile.TemporaryDirectory(prefix="torchserve-openvino-") as folder:
        path = Path(folder) / "model.xml"
        ov.save_model(model, path, compress_to_fp16=False)
        compiled = compile(core().read_model(path))
        _give_pages_back(path.with_suffix(".bin"))
    return compiled


def _give_pages_back(path: Path) -> None:
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        place, mode, _ = line.split(maxsplit=2)
        # A page that can be written may hold more than the file does.
        if line.endswith(str(path)) and "w" not in mode:
            first, last = (int(part, 16) for part in place.split("-"))
            if libc.madvise(first, last - first, _MADV_DONTNEED):
                logger.warning("madvise on %s failed: errno %d", path, ctypes.get_errno())
