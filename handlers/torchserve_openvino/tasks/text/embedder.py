"""Turns texts into vectors, pooled and normalized as the model's own files say."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchserve_openvino.errors import InvalidInputError
from torchserve_openvino.serving.loading import hub
from torchserve_openvino.serving.verification.measures import Cosine, Measure
from torchserve_openvino.tasks.arrays import Arrays
from torchserve_openvino.tasks.hub_handler import RequestInput
from torchserve_openvino.tasks.standard.embeddings import (
    OpenAIEmbeddings,
    TeiEmbed,
    TeiEmbedSparse,
    WordWeight,
    word_weights,
)
from torchserve_openvino.tasks.standard.form import Endpoint, ModelFacts
from torchserve_openvino.tasks.text.text_handler import (
    Outputs,
    TextHandler,
    TextHead,
    TokenizedInput,
    TokenRow,
    too_long,
)


class PooledHead(TextHead):
    """An encoder whose token vectors are pooled to one vector in the same graph.

    Formulas: sentence-transformers' models/Pooling.py and models/Normalize.py.

    Args:
        model: The encoder.
        takes_types: Whether it takes ``token_type_ids``.
        pooling: How they are pooled.
    """

    def __init__(self, model: nn.Module, takes_types: bool, pooling: hub.Pooling) -> None:
        super().__init__(model, takes_types)
        self._pooling = pooling

    def outputs(self, output: Any, mask: torch.Tensor) -> Outputs:
        """Returns the vectors, float32 ``[batch, width]``."""
        pooled = (
            self._weights(output.logits, mask) if self._pooling.sparse else self._mean(output.last_hidden_state, mask)
        )
        return (torch.nn.functional.normalize(pooled, p=2.0, dim=1) if self._pooling.normalizes else pooled,)

    def _mean(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self._pooling.mode == "cls":
            return tokens[:, 0]
        weights = mask.unsqueeze(-1).to(tokens.dtype)
        return (tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9)

    def _weights(self, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """SPLADE (Formal et al. 2021): ``log(1 + relu(logit))`` of each word, over the tokens that say so."""
        weights = (logits * mask.unsqueeze(-1).to(logits.dtype)).relu()
        for _ in range(self._pooling.logarithms):
            weights = weights.log1p()
        return weights.amax(1) if self._pooling.mode == "max" else weights.sum(1)


class SentenceEmbedder(TextHandler):
    """The vector of a text.

    Attributes:
        pooling: How the model's own files make one vector of its tokens.
    """

    task = "sentence_embedder"
    answers = list[float] | list[WordWeight]
    endpoints = (
        Endpoint("embeddings", OpenAIEmbeddings, frozenset({"input"}), by_body=True),
        Endpoint("embed", TeiEmbed),
        Endpoint("embed_sparse", TeiEmbedSparse),
    )

    def __init__(self) -> None:
        super().__init__()
        self.pooling = hub.Pooling()

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet."""
        return Cosine()

    def longest(self, folder: Path) -> int | None:
        """Returns the longest text in tokens that sentence-transformers' files state."""
        return hub.pooling_of(folder).longest

    def load(self, folder: Path) -> nn.Module:
        """Loads the model, and how its vectors are pooled: in a quantized model's graph, too."""
        self.pooling = hub.pooling_of(folder)
        return super().load(folder)

    def servable(self, model: Any) -> Any:
        """Returns the model with its pooling."""
        return PooledHead(model, "token_type_ids" in self.names, self.pooling)

    def served_model(self) -> ModelFacts:
        """Returns what standard forms depend on of the model."""
        return replace(super().served_model(), normalizes=self.pooling.normalizes, sparse=self.pooling.sparse)

    def read(self, part: RequestInput) -> Any:
        """Returns a text; in a standard form also a list of token ids.

        Raises:
            InvalidInputError: It is something else, or holds a token that the model does not know.
        """
        if part.form is None or not isinstance(part.input, list):
            return self.pooling.read(super().read(part))
        if not part.input:
            raise InvalidInputError("an empty list of token ids")
        for position, token in enumerate(part.input):
            if type(token) is not int or not 0 <= token < self.vocabulary:
                raise InvalidInputError(
                    f"token {position} is {token!r:.40}; token ids are numbers from 0 to {self.vocabulary - 1}"
                )
        return part.input

    def _encoded(self, parts: Sequence[RequestInput], truncates: bool) -> list[Any]:
        texts = iter(self._tokenized([part for part in parts if isinstance(part.input, str)], truncates))
        return [next(texts) if isinstance(part.input, str) else self._of_tokens(part, truncates) for part in parts]

    def _tokenized(self, parts: Sequence[RequestInput], truncates: bool) -> list[Any]:
        return super()._encoded(parts, truncates) if parts else []

    def _of_tokens(self, part: RequestInput, truncates: bool) -> Any:
        """Returns the sequence of an input that came as token ids, to which none are added; or its refusal."""
        ids = part.input[: self.limit] if truncates else part.input
        return (
            TokenizedInput(part, [TokenRow.of_tokens(ids)])
            if len(ids) <= self.limit
            else too_long(len(ids), self.limit)
        )

    def answer(self, tokenized: TokenizedInput, outputs: Sequence[Outputs]) -> Any:
        """Returns the numbers of the vector; of a sparse one, those that are not 0 with their places."""
        ((vector,),) = outputs
        # A standard form shortens vectors before they are written.
        return (
            word_weights(vector.float())
            if self.pooling.sparse and tokenized.part.form is None
            else Arrays(vector.float())
        )
