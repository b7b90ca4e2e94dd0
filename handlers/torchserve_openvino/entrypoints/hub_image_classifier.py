"""Classifies photos with a Hugging Face model: a photo in, labels with probabilities out."""

from torchserve_openvino.tasks.vision.classifier import HubImageClassifier


class OpenVINOHubImageClassifier(HubImageClassifier):
    """The handler class that TorchServe loads."""
