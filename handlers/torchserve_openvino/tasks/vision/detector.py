"""Detects objects, with answers in the format of TorchServe's own object_detector."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field

from torchserve_openvino.serving.verification.measures import Detections, Measure
from torchserve_openvino.tasks.forms import Answer
from torchserve_openvino.tasks.request_body import Parameters
from torchserve_openvino.tasks.vision.vision_handler import Outputs, PreparedPicture, VisionHandler, VisionHead

# Models whose last class is "no object"; `post_process_object_detection` of all others takes sigmoids.
_SOFTMAX = frozenset({"detr", "yolos", "table-transformer"})


class DetectorParameters(Parameters):
    """Parameters of an object detection."""

    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Least score of a box."""


class Detected(Answer):
    """An object: its score, and under its label its box, in pixels: left, top, right, bottom."""

    model_config = ConfigDict(extra="allow")

    score: float
    """Its score."""
    __pydantic_extra__: dict[str, tuple[float, float, float, float]] = Field(init=False)


class DetectorHead(VisionHead):
    """A detector that returns the logits and the box of each query."""

    def outputs(self, output: Any) -> Outputs:
        """Returns logits ``[batch, queries, classes]`` and boxes ``[batch, queries, 4]``."""
        return output.logits, output.pred_boxes


class ObjectDetector(VisionHandler):
    """The boxes of the objects in a photo."""

    task = "object_detector"
    parameters = DetectorParameters
    answers = list[Detected]
    head = DetectorHead

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet."""
        return Detections(has_no_object=self.model_config.model_type in _SOFTMAX)

    def answer(self, picture: PreparedPicture, outputs: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """Returns ``[{label: [x1, y1, x2, y2], "score": score}]``, in pixels of the picture as sent."""
        logits, boxes = (output.unsqueeze(0) for output in outputs)
        (detections,) = self.processor.post_process_object_detection(
            SimpleNamespace(logits=logits, pred_boxes=boxes),
            threshold=picture.part.parameters.threshold,
            target_sizes=torch.tensor([picture.size]),
        )
        columns = [detections[name].tolist() for name in ("labels", "boxes", "scores")]
        together = zip(*columns, strict=True)
        return [{self.label(number): box, "score": score} for number, box, score in together]
