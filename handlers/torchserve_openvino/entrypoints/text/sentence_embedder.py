"""Turns texts into vectors: a text in, numbers out."""

from torchserve_openvino.tasks.text.embedder import SentenceEmbedder


class OpenVINOSentenceEmbedder(SentenceEmbedder):
    """The handler class that TorchServe loads."""
