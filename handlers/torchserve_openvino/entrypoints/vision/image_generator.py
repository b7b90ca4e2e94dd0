"""Generates pictures with a diffusers pipeline: a prompt in, PNG or JSON out."""

from torchserve_openvino.tasks.pictures.handler import ImageGenerator


class OpenVINOImageGenerator(ImageGenerator):
    """The handler class that TorchServe loads."""
