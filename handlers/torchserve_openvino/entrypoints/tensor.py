"""Serves any model on tensors: JSON, .npy or KServe v2 in, the same out."""

from torchserve_openvino.tasks.tensor import TensorHandler


class OpenVINOTensorHandler(TensorHandler):
    """The handler class that TorchServe loads."""
