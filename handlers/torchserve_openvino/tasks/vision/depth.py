"""Estimates the depth of each pixel, with answers named as in Hugging Face's depth-estimation."""

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch

from torchserve_openvino.errors import PayloadTooLargeError
from torchserve_openvino.serving.verification.measures import Measure, Relative
from torchserve_openvino.tasks.arrays import Arrays
from torchserve_openvino.tasks.forms import Answer
from torchserve_openvino.tasks.picture_transforms import check_resized
from torchserve_openvino.tasks.request_body import Parameters
from torchserve_openvino.tasks.vision.vision_handler import Outputs, PreparedPicture, VisionHandler, VisionHead, png

# More numbers would take hundreds of megabytes: as Python's lists in an envelope, and as JSON.
_MOST_NUMBERS = 4_000_000


class DepthParameters(Parameters):
    """Parameters of a depth estimation."""

    format: Literal["png", "list"] = "png"
    """How `predicted_depth` is sent: a PNG of 16 bits, from the least depth to the greatest, or rows of numbers."""


class Depth(Answer):
    """The depth of each pixel."""

    predicted_depth: str | list[list[float]]
    """A PNG of 16 bits in base64, or rows of numbers."""
    depth: str
    """A PNG of 8 bits in base64, for people."""
    min: float
    """The least depth, which is 0 in the PNGs."""
    max: float
    """The greatest."""


class DepthHead(VisionHead):
    """A depth estimator that returns the depth only."""

    def outputs(self, output: Any) -> Outputs:
        """Returns the depth ``[batch, height, width]``."""
        return (output.predicted_depth,)


class DepthEstimator(VisionHandler):
    """The depth of each pixel of a photo."""

    task = "depth_estimator"
    answers_in_parallel = True
    parameters = DepthParameters
    answers = Depth
    head = DepthHead

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet."""
        return Relative()

    def answer(self, picture: PreparedPicture, outputs: Sequence[torch.Tensor]) -> Arrays | dict[str, Any]:
        """Returns ``{predicted_depth, depth, min, max}`` in the picture's size; ``depth`` is a PNG of 8 bits.

        Raises:
            PayloadTooLargeError: Rows of numbers are asked for, and there are too many.
        """
        height, width = picture.size
        check_resized(width, height, self._openvino.config.openvino.image, "a depth map of the picture's size")
        as_list = picture.part.parameters.format == "list"
        if as_list and height * width > _MOST_NUMBERS:
            raise PayloadTooLargeError(
                f"the depth of {width} x {height} pixels is too much for lists; set parameters.format to 'png'"
            )
        process = self.processor.post_process_depth_estimation
        # ZoeDepth cuts off what its processor adds around a picture, which it does not where pictures are stretched.
        unpadded = (
            self._settings.get("do_pad") is False and "do_remove_padding" in inspect.signature(process).parameters
        )
        (estimate,) = process(
            SimpleNamespace(predicted_depth=outputs[0].float().unsqueeze(0)), [picture.size],
            **({"do_remove_padding": False} if unpadded else {}),
        )  # fmt: skip
        depth = estimate["predicted_depth"].reshape(height, width)
        least, most = depth.min(), depth.max()
        # A depth that is the same everywhere has no range to divide by.
        scaled = (depth - least) / (most - least) if bool(most > least) else torch.zeros_like(depth)
        gray = {"depth": png((scaled * 255).to(torch.int32)), "min": float(least), "max": float(most)}
        if as_list:
            return Arrays({"predicted_depth": depth, **gray})
        return {"predicted_depth": png((scaled * 65535).round().to(torch.int32)), **gray}
