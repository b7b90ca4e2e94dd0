"""TorchServe's Java frontend: faults that lose requests, and how they are patched."""

from torchserve_openvino.frontend.jar import COMMAND, Frontend, State

__all__ = ["COMMAND", "Frontend", "State"]
