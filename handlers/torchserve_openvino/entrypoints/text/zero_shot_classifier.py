"""Classifies texts by labels of the request: a text and labels in, scores out."""

from torchserve_openvino.tasks.text.zero_shot import ZeroShotClassifier


class OpenVINOZeroShotClassifier(ZeroShotClassifier):
    """The handler class that TorchServe loads."""
