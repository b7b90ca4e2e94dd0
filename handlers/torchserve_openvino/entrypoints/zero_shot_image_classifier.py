"""Classifies photos by labels of the request: a photo and labels in, scores out."""

from torchserve_openvino.tasks.vision.zero_shot import ZeroShotImageClassifier


class OpenVINOZeroShotImageClassifier(ZeroShotImageClassifier):
    """The handler class that TorchServe loads."""
