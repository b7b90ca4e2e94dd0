"""Serve PyTorch models on OpenVINO through torch.compile, with a report of where each operator really ran.

import torchserve_openvino as tov
compiled = tov.compile(model, options={"device": "CPU", "verify": "first"})
y = compiled(x)
print(compiled.report.to_text())
"""

from typing import TYPE_CHECKING

from torchserve_openvino.lazy import attributes_of

if TYPE_CHECKING:
    from torchserve_openvino.backend import CompiledModule, compile
    from torchserve_openvino.hosts.torchserve.openvino_handler import OpenVINOHandler
    from torchserve_openvino.ops.mappings import forget_mappings, load_mappings, register_op
    from torchserve_openvino.report import CompileReport

__all__ = [
    "CompileReport",
    "CompiledModule",
    "OpenVINOHandler",
    "compile",
    "forget_mappings",
    "load_mappings",
    "register_op",
]

# Each name is imported on first use: the handler needs TorchServe, the compiler needs torch and OpenVINO, and reading
# a configuration needs none of them.
_HOMES = {
    "compile": "torchserve_openvino.backend",
    "CompiledModule": "torchserve_openvino.backend",
    "CompileReport": "torchserve_openvino.report",
    "forget_mappings": "torchserve_openvino.ops.mappings",
    "load_mappings": "torchserve_openvino.ops.mappings",
    "register_op": "torchserve_openvino.ops.mappings",
    "OpenVINOHandler": "torchserve_openvino.hosts.torchserve.openvino_handler",
}

__getattr__ = attributes_of(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
