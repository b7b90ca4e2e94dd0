"""The torch.compile backend, one file per stage, in the order a graph travels.

That is capture -> partition -> convert -> build -> execute. It knows nothing of TorchServe.
"""

from torchserve_openvino.backend.compiled import CompiledModule
from torchserve_openvino.backend.entry import compile, openvino_serving

__all__ = ["CompiledModule", "compile", "openvino_serving"]
