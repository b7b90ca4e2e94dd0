"""Segments photos by class, with answers in the format of TorchServe's own image_segmenter."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from torchserve_openvino.serving.verification.measures import Measure, Top1
from torchserve_openvino.tasks.arrays import Arrays
from torchserve_openvino.tasks.forms import Answer
from torchserve_openvino.tasks.picture_transforms import check_resized
from torchserve_openvino.tasks.request_body import Parameters
from torchserve_openvino.tasks.vision.vision_handler import PreparedPicture, VisionHandler, png


class SegmenterParameters(Parameters):
    """Parameters of a semantic segmentation."""

    format: Literal["list", "png"] = "list"
    """`list`: class and probability of each pixel of the model's input. `png`: a label map of the picture's size."""


class LabelMap(Answer):
    """The class of each pixel, for `format: png`."""

    label_map: str
    """A PNG in base64, whose grey values are numbers of classes."""
    labels: dict[str, str]
    """The name of each number in it."""


class ImageSegmenter(VisionHandler):
    """The class of each pixel of a photo."""

    task = "image_segmenter"
    answers_in_parallel = True
    parameters = SegmenterParameters
    answers = list[list[tuple[float, float]]] | LabelMap

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet."""
        return Top1(axis=1)

    def answer(self, picture: PreparedPicture, outputs: Sequence[torch.Tensor]) -> Any:
        """Returns rows of ``[class, probability]``; as PNG ``{label_map, labels}``, with the names of its numbers."""
        # Models may hand over the classes of a pixel side by side, which takes 1.5 times as long from here on.
        logits = outputs[0].float().contiguous()
        if picture.part.parameters.format == "png":
            height, width = picture.size
            check_resized(width, height, self._openvino.config.openvino.image, "a label map of the picture's size")
            classes = _classes(logits, picture.size)
            names = {str(number): self.label(number) for number in classes.unique().tolist()}
            return {"label_map": png(classes), "labels": names}
        # TorchServe's segmenter answers in the size of the model's input, too.
        grown = _grown(logits.unsqueeze(0), picture.tensors["pixel_values"].shape[1:])
        best = torch.softmax(grown, dim=1).max(dim=1)
        return Arrays(torch.stack([best.indices.to(best.values.dtype), best.values], dim=3)[0])


def _classes(logits: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Returns the best class of each pixel, as `post_process_semantic_segmentation` does.

    Class by class: all of them in the size of a large photo would take gigabytes.

    Args:
        logits: ``[classes, height, width]``.
        size: Height and width of the result.
    """
    best = _grown(logits[None, :1], size)[0, 0]
    classes = torch.zeros(best.shape, dtype=torch.int32)
    for number in range(1, len(logits)):
        mask = _grown(logits[None, number : number + 1], size)[0, 0]
        better = mask > best
        classes[better] = number
        best = torch.where(better, mask, best)
    return classes


def _grown(logits: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    return torch.nn.functional.interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)
