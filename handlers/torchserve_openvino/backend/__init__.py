"""The torch.compile backend, one file per stage, in the order a graph travels.

That is capture -> partition -> convert -> build -> execute. It knows nothing of TorchServe.
"""

from torchserve_openvino.backend.compiled import CompiledModule
from torchserve_openvino.backend.entry import compile, openvino_serving
from torchserve_openvino.backend.open_axes import OpenAxes

__all__ = ["CompiledModule", "OpenAxes", "compile", "openvino_serving"]
