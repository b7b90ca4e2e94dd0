"""The torch.compile backend, one folder per stage; ARCHITECTURE.md describes how a graph passes through them.

It does not depend on TorchServe.
"""

from torchserve_openvino.backend.compiled import CompiledModule
from torchserve_openvino.backend.entry import compile, openvino_serving
from torchserve_openvino.backend.open_axes import OpenAxes

__all__ = ["CompiledModule", "OpenAxes", "compile", "openvino_serving"]
