"""Finds entities in texts: a text in, labeled spans out."""

from torchserve_openvino.tasks.text.token_classifier import TokenClassifier


class OpenVINOTokenClassifier(TokenClassifier):
    """The handler class that TorchServe loads."""
