"""Fills the masked word of a text: a text in, the most probable words out."""

from torchserve_openvino.tasks.text.fill_mask import FillMask


class OpenVINOFillMask(FillMask):
    """The handler class that TorchServe loads."""
