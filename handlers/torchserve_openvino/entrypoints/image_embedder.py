"""Turns photos into vectors with a Hugging Face model: a photo in, numbers out."""

from torchserve_openvino.tasks.vision.embedder import ImageEmbedder


class OpenVINOImageEmbedder(ImageEmbedder):
    """The handler class that TorchServe loads."""
