"""Classifies texts, with answers in the format of TorchServe's own text_classifier."""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field

from torchserve_openvino.errors import NonFiniteOutputError
from torchserve_openvino.tasks.asks import Parameters
from torchserve_openvino.tasks.text.base import Outputs, Rows, TextHandler, probabilities


class ClassifierParameters(Parameters):
    """Parameters of a text classification."""

    top_k: Annotated[int, Field(ge=1)] | None = None
    """How many labels to return, most probable first; all by default."""


class TextClassifier(TextHandler):
    """The labels of a text with their probabilities, most probable first."""

    task = "text_classifier"
    parameters = ClassifierParameters

    def answer(self, asked: Rows, outputs: Sequence[Outputs]) -> dict[str, float]:
        """Returns ``{label: probability}``; of a regression, the number that the model returns."""
        ((logits,),) = outputs
        scores = self._scores(logits)
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        return {self.label(number): scores[number] for number in order[: asked.part.parameters.top_k]}

    def _scores(self, logits: torch.Tensor) -> list[float]:
        """Applies what transformers' pipeline does: softmax, sigmoid for independent labels, nothing for regression."""
        config: Any = self.eager_model.model.config
        if config.problem_type != "regression" and (
            config.problem_type == "multi_label_classification" or config.num_labels == 1
        ):
            return torch.sigmoid(logits.float()).tolist()
        if config.problem_type == "regression":
            if bool(logits.isnan().any()):
                raise NonFiniteOutputError("the model's result is not a number for this input")
            return logits.float().tolist()
        return probabilities(logits)
