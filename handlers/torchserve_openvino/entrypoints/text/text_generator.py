"""Generates text: a prompt or a chat in, text out; in OpenAI's form and in our own."""

from torchserve_openvino.tasks.generation.generator import TextGenerator


class OpenVINOTextGenerator(TextGenerator):
    """The handler class that TorchServe loads."""
