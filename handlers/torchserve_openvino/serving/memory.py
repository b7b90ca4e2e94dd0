"""Measures the worker's memory, and frees what is no longer needed."""

import ctypes
import gc
import logging
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from torchserve_openvino.backend import CompiledModule
from torchserve_openvino.backend.runtime.compare import output_tensors
from torchserve_openvino.backend.runtime.own_weights import give_pages_back
from torchserve_openvino.errors import ModelLoadError, WeightsReleasedError
from torchserve_openvino.report import CompileReport
from torchserve_openvino.serving.shapes.warmup import Case

logger = logging.getLogger(__name__)

# Files of which weights may be mapped.
_WEIGHTS = frozenset({".safetensors", ".pt", ".pth", ".bin", ".pt2"})
# By how much a worker's memory may exceed what is in use before the rest is given back.
_RESIDENT_SHARE = 1.03


def memory() -> dict[str, int]:
    """Returns this process's memory in bytes: ``rss``, resident, and ``uss``, not shared with other processes."""
    info = psutil.Process().memory_full_info()
    return {"rss": int(info.rss), "uss": int(info.uss)}


def release_weights(
    compiled: CompiledModule, cases: Sequence[Case], report: CompileReport
) -> dict[str, dict[str, int]]:
    """Frees the eager weights if nothing needs them, and checks that the answers stay the same.

    Returns:
        `memory` before and after; empty if the weights are still needed, and the report says why.

    Raises:
        ModelLoadError: An answer changed.
    """
    shapes = [case for case in cases if case.compiled_shape]
    expected = [_run(compiled, case) for case in shapes]
    before = memory()
    try:
        compiled.release_weights()
    except WeightsReleasedError as error:
        logger.warning("handler.openvino.release_weights: %s", error)
        report.tracker.add_note(f"release_weights: {error}")
        return {}
    gc.collect()
    _trim()
    after = memory()
    for case, tensors in zip(shapes, expected, strict=True):
        if not all(torch.equal(a, b) for a, b in zip(_run(compiled, case), tensors, strict=True)):
            raise ModelLoadError(
                f"{case.name}: the answer changed when the weights were released; "
                "set handler.openvino.release_weights: false"
            )
    logger.info("Released the weights: %.0f MB resident before, %.0f MB after", before["rss"] / 1e6, after["rss"] / 1e6)
    return {"before_release": before, "after_release": after}


def tidy(compiled: object, model_dir: Path) -> None:
    """Frees memory that a worker needs only until it is READY.

    Eager weights that are mapped from a file, as transformers maps those in safetensors, stay usable: the system reads
    a page again when something reads the weight.

    Args:
        compiled: The compiled model.
        model_dir: The unpacked archive; pages of its files that nobody wrote to are released.
    """
    if isinstance(compiled, CompiledModule):
        compiled.give_memory_back()
    give_pages_back({path.resolve() for path in model_dir.rglob("*") if path.suffix in _WEIGHTS})
    _trim()


class FreedMemory:
    """Gives freed memory back to the operating system, where requests have left much of it: glibc would keep it."""

    def __init__(self) -> None:
        self._most = 0

    def give_back(self) -> None:
        """Gives it back if more is resident than at the first call, or than what was in use at the last time."""
        resident = psutil.Process().memory_info().rss
        if self._most and resident > self._most:
            _trim()
            resident = psutil.Process().memory_info().rss
        self._most = max(self._most, int(resident * _RESIDENT_SHARE))


def _run(compiled: CompiledModule, case: Case) -> list[torch.Tensor]:
    args, kwargs = case.inputs
    with case.modes.on():
        # `torch.equal` takes NaN for different from NaN.
        return [tensor.nan_to_num() for tensor in output_tensors(compiled(*args, **kwargs))]


def _trim() -> None:
    """Returns freed memory to the operating system; glibc would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
