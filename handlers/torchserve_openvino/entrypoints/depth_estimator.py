"""Estimates depth with a Hugging Face model: a photo in, the depth of each pixel out."""

from torchserve_openvino.tasks.vision.depth import DepthEstimator


class OpenVINODepthEstimator(DepthEstimator):
    """The handler class that TorchServe loads."""
