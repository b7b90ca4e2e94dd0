"""Compiles a model so that it does not need PyTorch's copy of the weights.

A converted model's constants share the tensors' memory, which therefore can't be freed. Here the weights are written to
a private file that OpenVINO maps: what it packs into its own layout stays in memory, and the file's pages are released
to the system, which reads a page again if it is needed.
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
