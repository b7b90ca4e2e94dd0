"""The torch.compile backend, one folder per stage; ARCHITECTURE.md describes how a graph passes through them.

It does not depend on TorchServe.
"""

from typing import TYPE_CHECKING

from torchserve_openvino.lazy import attributes_of

if TYPE_CHECKING:
    from torchserve_openvino.backend.compiled import CompiledModule
    from torchserve_openvino.backend.entry import compile, openvino_serving
    from torchserve_openvino.backend.spec import OpenAxes

__all__ = ["CompiledModule", "OpenAxes", "compile", "openvino_serving"]

# Imported on first use, because `passes` imports `backend.upstream`, and the stages of the backend import `passes`.
_HOMES = {
    "CompiledModule": "torchserve_openvino.backend.compiled",
    "OpenAxes": "torchserve_openvino.backend.spec",
    "compile": "torchserve_openvino.backend.entry",
    "openvino_serving": "torchserve_openvino.backend.entry",
}

__getattr__ = attributes_of(__name__, _HOMES)
