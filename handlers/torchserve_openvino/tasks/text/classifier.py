"""Classifies texts, with answers in the format of TorchServe's own text_classifier."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from torchserve_openvino.config.spelling import listed
from torchserve_openvino.errors import InvalidInputError, NotExplainedError
from torchserve_openvino.serving.loading.labels import by_label
from torchserve_openvino.serving.verification.measures import Measure
from torchserve_openvino.tasks.forms import Answer
from torchserve_openvino.tasks.request_body import Parameters
from torchserve_openvino.tasks.scores import class_scores, measure_of
from torchserve_openvino.tasks.standard.classes import TeiPredict
from torchserve_openvino.tasks.standard.form import Endpoint
from torchserve_openvino.tasks.text.text_handler import Outputs, TextHandler, TokenizedInput

# --- explains a model's score for a text by its tokens, with integrated gradients, in eager PyTorch ---------------
# Sundararajan et al., "Axiomatic Attribution for Deep Networks" (2017), over the embeddings of the tokens. TorchServe's
# own text_classifier does the same with captum's `LayerIntegratedGradients`. A compiled graph has no gradients.


# Most points of the path that run together: each keeps all activations of the model for its gradients.
_TOGETHER = 10


class ExplanationParameters(Parameters):
    """Parameters of an explanation."""

    target: str | int | None = None
    """The label whose score is explained, by its name or number; by default the most probable one."""
    steps: Annotated[int, Field(ge=2, le=200)] = 50
    """How many points the integral is computed at."""


class Explanation(Answer):
    """How much each token contributes to a label's score."""

    label: str
    """The label."""
    words: list[str]
    """The tokens."""
    importances: list[float]
    """Contribution of each to the score (logit); they sum to its difference from that of padding alone."""
    delta: float
    """By how much the sum misses that difference; more `steps` make it smaller."""


@dataclass(frozen=True)
class Attributions:
    """What each token contributes.

    Attributes:
        importances: Contributions, ``[tokens]``.
        delta: The error of their sum.
    """

    importances: torch.Tensor
    delta: float


def integrated_gradients(
    model: Any, inputs: Mapping[str, torch.Tensor], blank: torch.Tensor, target: int, steps: int
) -> Attributions:
    """Returns the contributions of tokens to a score.

    Args:
        model: A Hugging Face classifier.
        inputs: Its inputs for one text, int64 ``[1, tokens]`` each.
        blank: The token ids of a text that says nothing, of the same length.
        target: The number of the label.
        steps: Points of the path between the two texts.

    Raises:
        NotExplainedError: The model does not take embeddings, or answers differently to them.
    """
    others = {name: value for name, value in inputs.items() if name != "input_ids"}

    def scores(embeddings: torch.Tensor) -> torch.Tensor:
        rows = {name: value.expand(len(embeddings), -1) for name, value in others.items()}
        return model(inputs_embeds=embeddings, **rows).logits[:, target]

    with torch.no_grad():
        expected = model(**inputs).logits[0, target]
        try:
            embed = model.get_input_embeddings()
            start, end = embed(blank), embed(inputs["input_ids"])
            from_start, from_end = scores(torch.cat([start, end])).unbind()
        except (NotImplementedError, TypeError, ValueError) as error:
            raise NotExplainedError(f"{type(model).__name__} does not take embeddings: {error}") from error
    if not torch.allclose(from_end, expected, rtol=1e-3, atol=1e-3):
        raise NotExplainedError(f"{type(model).__name__} scores embeddings differently from the text they are of")
    points, weights = (torch.tensor(array, dtype=end.dtype) / 2 for array in np.polynomial.legendre.leggauss(steps))
    total = torch.zeros_like(end)
    for block, weight in zip(points.split(_TOGETHER), weights.split(_TOGETHER), strict=True):
        path = (start + (block + 0.5).view(-1, 1, 1) * (end - start)).requires_grad_()
        with torch.enable_grad():
            (gradients,) = torch.autograd.grad(scores(path).sum(), path)
        total += (gradients * weight.view(-1, 1, 1)).sum(0)
    importances = ((end - start) * total).sum(-1)[0]
    return Attributions(importances, float(importances.sum() - (from_end - from_start)))


# --- classifies texts, with answers in the format of TorchServe's own text_classifier -----------------------------


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

    def answer(self, tokenized: TokenizedInput, outputs: Sequence[Outputs]) -> dict[str, float]:
        """Returns ``{label: probability}``; of a regression, the number that the model returns."""
        ((logits,),) = outputs
        scores = class_scores(self._openvino.eager_model.model.config, logits)
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        return by_label((self.label(number), scores[number]) for number in order[: tokenized.part.parameters.top_k])

    def explanation(self, value: TokenizedInput) -> dict[str, Any]:
        """Returns ``{label, words, importances, delta}``, computed in eager PyTorch.

        Raises:
            InvalidInputError: The request asks about a label that the model does not have.
            NotExplainedError: The model can't be explained.
            ForbiddenFallbackError: The policy does not allow eager PyTorch.
        """
        return self.in_eager("explanations", lambda: self._attributed(value))

    def _attributed(self, value: TokenizedInput) -> dict[str, Any]:
        (row,), parameters = value.rows, value.part.parameters
        model, encoding = self._openvino.eager_model.model, row.encoding
        inputs = self.inputs([row])
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
