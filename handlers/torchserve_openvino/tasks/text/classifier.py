"""Classifies texts, with answers in the format of TorchServe's own text_classifier."""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field

from torchserve_openvino.config.spelling import listed
from torchserve_openvino.errors import InvalidInputError
from torchserve_openvino.serving.verification.measures import Measure
from torchserve_openvino.tasks.request_body import Parameters
from torchserve_openvino.tasks.scores import class_scores, measure_of
from torchserve_openvino.tasks.standard.classes import TeiPredict
from torchserve_openvino.tasks.standard.form import Endpoint
from torchserve_openvino.tasks.text.base import Outputs, Rows, TextHandler
from torchserve_openvino.tasks.text.explain import Explanation, ExplanationParameters, integrated_gradients
from torchserve_openvino.tasks.text.rows import tensors


class ClassifierParameters(Parameters):
    """Parameters of a text classification."""

    top_k: Annotated[int, Field(ge=1)] | None = None
    """How many labels to return, most probable first; all by default."""


class TextClassifier(TextHandler):
    """The labels of a text with their probabilities, most probable first."""

    task = "text_classifier"
    parameters = ClassifierParameters
    answers = dict[str, float]
    endpoints = (Endpoint("predict", TeiPredict),)
    explanation_parameters = ExplanationParameters
    explanations = Explanation

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet."""
        return measure_of(self._openvino.eager_model.model.config)

    def answer(self, tokenized: Rows, outputs: Sequence[Outputs]) -> dict[str, float]:
        """Returns ``{label: probability}``; of a regression, the number that the model returns."""
        ((logits,),) = outputs
        scores = class_scores(self._openvino.eager_model.model.config, logits)
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        return {self.label(number): scores[number] for number in order[: tokenized.part.parameters.top_k]}

    def explanation(self, value: Rows) -> dict[str, Any]:
        """Returns ``{label, words, importances, delta}``, computed in eager PyTorch.

        Raises:
            InvalidInputError: The request asks about a label that the model does not have.
            NotExplainedError: The model can't be explained.
            ForbiddenFallbackError: The policy does not allow eager PyTorch.
        """
        return self.in_eager("explanations", lambda: self._attributed(value))

    def _attributed(self, value: Rows) -> dict[str, Any]:
        (row,), parameters = value.rows, value.part.parameters
        model, encoding = self._openvino.eager_model.model, row.encoding
        inputs = tensors([row], self.names, self._pad)
        target = self._target(parameters.target)
        if target is None:
            with torch.no_grad():
                target = int(model(**inputs).logits[0].argmax())
        # Special tokens stay: a text of padding alone has them, too.
        special = torch.tensor([encoding.special_tokens_mask]).bool()
        blank = torch.where(special, inputs["input_ids"], self._pad)
        attribution = integrated_gradients(model, inputs, blank, target, parameters.steps)
        self.check_finite([attribution.importances])
        return {
            "label": self.label(target),
            "words": list(encoding.tokens),
            "importances": attribution.importances.tolist(),
            "delta": attribution.delta,
        }

    def _target(self, label: str | int | None) -> int | None:
        """Returns the number of the label that a request asks about.

        Raises:
            InvalidInputError: There is no such label.
        """
        labels = [self.label(number) for number in range(self._openvino.eager_model.model.config.num_labels)]
        if label is None:
            return None
        if isinstance(label, int) and 0 <= label < len(labels):
            return label
        if label not in labels:
            raise InvalidInputError(f"parameters.target: this model has no label {label!r}; it has {listed(labels)}")
        return labels.index(str(label))
