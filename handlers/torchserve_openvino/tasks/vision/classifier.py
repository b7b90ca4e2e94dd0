"""Classifies photos with a Hugging Face model, with answers in the format of TorchServe's own image_classifier."""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field

from torchserve_openvino.serving.loading.labels import by_label
from torchserve_openvino.serving.verification.measures import Measure
from torchserve_openvino.tasks.request_body import Parameters
from torchserve_openvino.tasks.scores import class_scores, measure_of
from torchserve_openvino.tasks.vision.vision_handler import PreparedPicture, VisionHandler


class ClassifierParameters(Parameters):
    """Parameters of an image classification."""

    top_k: Annotated[int, Field(ge=1)] | None = None
    """How many labels to return, most probable first; by default ``handler.openvino.image.top_k``."""


class HubImageClassifier(VisionHandler):
    """The most probable labels of a photo."""

    task = "hub_image_classifier"
    parameters = ClassifierParameters
    answers = dict[str, float]

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet."""
        return measure_of(self.model_config)

    def answer(self, picture: PreparedPicture, outputs: Sequence[torch.Tensor]) -> dict[str, float]:
        """Returns ``{label: probability}``; of a regression, the number that the model returns."""
        scores = class_scores(self.model_config, outputs[0])
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        top_k = picture.part.parameters.top_k or self._openvino.config.openvino.image.top_k
        return by_label((self.label(number), scores[number]) for number in order[:top_k])
