"""Classifies photos: bytes, base64 or nested lists in, the most probable labels out."""

from torchserve_openvino.tasks.image_classifier import ImageClassifier


class OpenVINOImageClassifier(ImageClassifier):
    """The handler class that TorchServe loads."""
