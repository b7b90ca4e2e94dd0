"""Explains a model's score for a text by its tokens, with integrated gradients, in eager PyTorch.

Sundararajan et al., "Axiomatic Attribution for Deep Networks" (2017), over the embeddings of the tokens. TorchServe's
own text_classifier does the same with captum's `LayerIntegratedGradients`. A compiled graph has no gradients.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from torchserve_openvino.errors import NotExplainedError
from torchserve_openvino.tasks.forms import Answer
from torchserve_openvino.tasks.request_body import Parameters

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
    points, weights = (torch.tensor(each, dtype=end.dtype) / 2 for each in np.polynomial.legendre.leggauss(steps))
    total = torch.zeros_like(end)
    for block, weight in zip(points.split(_TOGETHER), weights.split(_TOGETHER), strict=True):
        path = (start + (block + 0.5).view(-1, 1, 1) * (end - start)).requires_grad_()
        with torch.enable_grad():
            (gradients,) = torch.autograd.grad(scores(path).sum(), path)
        total += (gradients * weight.view(-1, 1, 1)).sum(0)
    importances = ((end - start) * total).sum(-1)[0]
    return Attributions(importances, float(importances.sum() - (from_end - from_start)))
