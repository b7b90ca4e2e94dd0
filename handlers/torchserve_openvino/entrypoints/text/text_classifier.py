"""Classifies texts of a Hugging Face model: a text in, labels with probabilities out."""

from torchserve_openvino.tasks.text.classifier import TextClassifier


class OpenVINOTextClassifier(TextClassifier):
    """The handler class that TorchServe loads."""
