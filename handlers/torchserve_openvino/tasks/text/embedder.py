"""Turns texts into vectors, pooled and normalised as the model's own files say."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchserve_openvino.serving.loading import hub
from torchserve_openvino.tasks.arrays import Arrays
from torchserve_openvino.tasks.text.base import Head, Outputs, Rows, TextHandler


class PooledHead(Head):
    """An encoder whose token vectors are pooled to one vector in the same graph.

    Formulas: sentence-transformers' models/Pooling.py and models/Normalize.py.

    Args:
        model: The encoder.
        takes_types: Whether it takes ``token_type_ids``.
        pooling: ``mean`` over the text's tokens, or ``cls``, the first token.
        normalises: Whether the vector's length becomes 1.
    """

    def __init__(self, model: nn.Module, takes_types: bool, pooling: str = "mean", normalises: bool = False) -> None:
        super().__init__(model, takes_types)
        self._pooling, self._normalises = pooling, normalises

    def outputs(self, found: Any, mask: torch.Tensor) -> Outputs:
        """Returns the vectors, float32 ``[batch, width]``."""
        tokens = found.last_hidden_state
        if self._pooling == "cls":
            pooled = tokens[:, 0]
        else:
            weights = mask.unsqueeze(-1).to(tokens.dtype)
            pooled = (tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return (torch.nn.functional.normalize(pooled, p=2.0, dim=1) if self._normalises else pooled,)


class SentenceEmbedder(TextHandler):
    """The vector of a text."""

    task = "sentence_embedder"
    answers = list[float]

    def longest(self, folder: Path) -> int | None:
        """Returns the longest text in tokens that sentence-transformers' files state."""
        return hub.pooling_of(folder)[2]

    def servable(self, model: Any) -> Any:
        """Returns the model with its pooling."""
        pooling, normalises, _ = hub.pooling_of(self.folder)
        return PooledHead(model, "token_type_ids" in self.names, pooling, normalises)

    def answer(self, asked: Rows, outputs: Sequence[Outputs]) -> Arrays:
        """Returns the numbers of the vector."""
        ((vector,),) = outputs
        return Arrays(vector.float())
