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

    def answer(self, asked: Rows, outputs: Sequence[Outputs]) -> dict[str, float]:
        """Returns ``{label: probability}``; of a regression, the number that the model returns."""
        ((logits,),) = outputs
        scores = class_scores(self._openvino.eager_model.model.config, logits)
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        return {self.label(number): scores[number] for number in order[: asked.part.parameters.top_k]}

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
        given = tensors([row], self.names, self._pad)
        target = self._target(parameters.target)
        if target is None:
            with torch.no_grad():
                target = int(model(**given).logits[0].argmax())
        # Special tokens stay: a text of padding alone has them, too.
        special = torch.tensor([encoding.special_tokens_mask]).bool()
        blank = torch.where(special, given["input_ids"], self._pad)
        found = integrated_gradients(model, given, blank, target, parameters.steps)
        self.check_finite([found.importances])
        return {
            "label": self.label(target),
            "words": list(encoding.tokens),
            "importances": found.importances.tolist(),
            "delta": found.delta,
        }

    def _target(self, wanted: str | int | None) -> int | None:
        """Returns the number of the label that a request asks about.

        Raises:
            InvalidInputError: There is no such label.
        """
        labels = [self.label(number) for number in range(self._openvino.eager_model.model.config.num_labels)]
        if wanted is None:
            return None
        if isinstance(wanted, int) and 0 <= wanted < len(labels):
            return wanted
        if wanted not in labels:
            raise InvalidInputError(f"parameters.target: this model has no label {wanted!r}; it has {listed(labels)}")
        return labels.index(str(wanted))
