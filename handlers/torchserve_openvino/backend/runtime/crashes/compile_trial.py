"""Compiles a model in a process of its own, to see whether OpenVINO's compiler survives it."""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import openvino as ov

from torchserve_openvino.backend.runtime.crashes import child

logger = logging.getLogger(__name__)

# Signals by which the operating system or the C library ends a process for its own errors. Others come from outside.
CRASHES = frozenset({"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"})


def trial_of_model(model: ov.Model, device: str, properties: Mapping[str, Any], libraries: Sequence[Path]) -> str:
    """Compiles a model elsewhere; returns the name of the signal that ended that process, empty for none."""
    with tempfile.TemporaryDirectory(prefix="torchserve-openvino-") as folder:
        path = Path(folder) / "model.xml"
        ov.save_model(model, path, compress_to_fp16=False)
        return trial_of_file(path, device, properties, libraries)


def trial_of_file(
    path: Path, device: str, properties: Mapping[str, Any], libraries: Sequence[Path] = (), blob: bool = False
) -> str:
    """Compiles a stored model elsewhere, or imports a blob; returns as `trial_of_model` does."""
    request = {
        "path": str(path),
        "device": device,
        "properties": {name: value for name, value in properties.items() if not callable(value)},
        "libraries": [str(library) for library in libraries],
        "blob": blob,
    }
    # As a file: `python -m` would import the packages around it, and with them torch.
    code = f"import runpy; runpy.run_path({child.__file__!r}, run_name='__main__')"
    # It ends when its input does, so it does not outlive this process. TorchServe reads metrics from standard output.
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code], stdin=subprocess.PIPE, stdout=2,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
        process.stdin.flush()
        ended = process.wait()
    if ended in (0, child.REFUSED):
        return ""
    name = signal_name(ended) or f"exit code {ended}"
    if name in CRASHES:
        return name
    logger.warning("The process that compiles for a trial ended by %s, which says nothing", name)
    return ""


def signal_name(code: int) -> str:
    """Returns the name of the signal that ended a process with this exit code; empty if none did."""
    return next((signum.name for signum in signal.Signals if signum.value == -code), "")
