"""Detects objects with a Hugging Face model: a photo in, labels with boxes out."""

from torchserve_openvino.tasks.vision.detector import ObjectDetector


class OpenVINOObjectDetector(ObjectDetector):
    """The handler class that TorchServe loads."""
