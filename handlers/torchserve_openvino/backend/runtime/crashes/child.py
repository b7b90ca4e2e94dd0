"""Compiles one model, and ends: `compile_trial.py` sees how. Imports nothing but OpenVINO.

Reads a line of JSON from standard input: ``path`` of the model or blob, ``device``, ``properties``, ``libraries``.
"""

import json
import os
import sys
import threading
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

import numpy as np
import openvino as ov

REFUSED = 77


def main() -> None:
    """Compiles or imports, and ends the process; exit code 0, or 77 if OpenVINO raises an error."""
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if resource is not None:
        # Nobody needs a core dump of a death that is expected.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    core = ov.Core()
    for library in request["libraries"]:
        core.add_extension(library)
    try:
        if request["blob"]:
            data = np.memmap(request["path"], dtype=np.uint8, mode="c")
            core.import_model(ov.Tensor(data, shared_memory=True), request["device"], request["properties"])
        else:
            core.compile_model(Path(request["path"]), request["device"], request["properties"])
    except RuntimeError:
        # The caller gets the same error when it compiles the model itself, and reports it.
        os._exit(REFUSED)
    # Without the destructors of the model, which are no part of the question.
    os._exit(0)


def _end_with_parent() -> None:
    # Not through `sys.stdin`, whose lock would then be held when the interpreter ends.
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
