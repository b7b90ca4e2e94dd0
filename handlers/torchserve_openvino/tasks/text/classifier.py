"""Classifies texts, with answers in the format of TorchServe's own text_classifier."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from torchserve_openvino.tasks.asks import Parameters
from torchserve_openvino.tasks.scores import class_scores
from torchserve_openvino.tasks.text.base import Outputs, Rows, TextHandler


class ClassifierParameters(Parameters):
    """Parameters of a text classification."""

    top_k: Annotated[int, Field(ge=1)] | None = None
    """How many labels to return, most probable first; all by default."""


class TextClassifier(TextHandler):
    """The labels of a text with their probabilities, most probable first."""

    task = "text_classifier"
    parameters = ClassifierParameters
    answers = dict[str, float]

    def answer(self, asked: Rows, outputs: Sequence[Outputs]) -> dict[str, float]:
        """Returns ``{label: probability}``; of a regression, the number that the model returns."""
        ((logits,),) = outputs
        scores = class_scores(self.eager_model.model.config, logits)
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        return {self.label(number): scores[number] for number in order[: asked.part.parameters.top_k]}
