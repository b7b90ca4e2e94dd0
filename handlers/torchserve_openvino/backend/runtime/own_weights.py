"""A compiled model that does not need PyTorch's copy of the weights.

A converted model's constants share the tensors' memory, so that this memory can't be freed. Here they go through a
private file that OpenVINO maps instead: what it packed into its own layout stays in memory, and pages of the file that
it does not need any more are given back to the system, which reads them again if it must.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import openvino as ov

from torchserve_openvino.backend.runtime.pages import give_pages_back
from torchserve_openvino.backend.upstream._openvino_private import core

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
        give_pages_back([path.with_suffix(".bin").resolve()])
    return compiled
