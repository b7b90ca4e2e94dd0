"""Segments photos with a Hugging Face model: a photo in, the class of each pixel out."""

from torchserve_openvino.tasks.vision.segmenter import ImageSegmenter


class OpenVINOImageSegmenter(ImageSegmenter):
    """The handler class that TorchServe loads."""
