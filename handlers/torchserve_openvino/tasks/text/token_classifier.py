"""Finds entities in texts: names, places and whatever else the model was trained to mark."""

from collections.abc import Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal

import torch

from torchserve_openvino.serving.verification.measures import Measure, Top1
from torchserve_openvino.tasks.forms import Answer
from torchserve_openvino.tasks.request_body import Parameters
from torchserve_openvino.tasks.text.text_handler import Outputs, TextHandler, TokenizedInput


class TokenParameters(Parameters):
    """Parameters of a token classification, as in Hugging Face's inference API."""

    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] = "simple"
    """How tokens become entities: `none` returns tokens; `simple` joins neighbors of one label; the others give all
    tokens of a word one label."""
    ignore_labels: tuple[str, ...] = ("O",)
    """Labels that are left out."""


class Entity(Answer):
    """Neighboring tokens of one label."""

    entity_group: str
    """The label."""
    score: float
    """Its score."""
    word: str
    """The text, as the tokenizer writes it."""
    start: int | None
    """Where it begins in the text, in characters."""
    end: int | None
    """Where it ends."""


class Token(Answer):
    """A single token with its label, for `aggregation_strategy: none`."""

    entity: str
    """The label."""
    score: float
    """Its score."""
    index: int
    """Its number in the text."""
    word: str
    """The token."""
    start: int | None
    """Where it begins in the text, in characters."""
    end: int | None
    """Where it ends."""


class TokenClassifier(TextHandler):
    """Entities with their label, score, and place in the text."""

    task = "token_classifier"
    parameters = TokenParameters
    answers = list[Entity] | list[Token]

    @cached_property
    def _pipeline(self) -> Any:
        # Its aggregation is what users compare with, so it is used itself: without its `__init__`, which looks for
        # weights, and moves them to a GPU.
        from transformers import TokenClassificationPipeline

        pipeline = object.__new__(TokenClassificationPipeline)
        names = {number: self.label(number) for number in self.labels}
        pipeline.model, pipeline.tokenizer = SimpleNamespace(config=SimpleNamespace(id2label=names)), self.tokenizer
        return pipeline

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet."""
        return Top1()

    def answer(self, tokenized: TokenizedInput, outputs: Sequence[Outputs]) -> list[dict[str, Any]]:
        """Returns ``[{entity_group, score, word, start, end}]``; with ``none`` tokens, ``entity`` and ``index``."""
        from transformers.pipelines.token_classification import AggregationStrategy

        (row,), ((logits,),) = tokenized.rows, outputs
        encoding, parameters = row.encoding, tokenized.part.parameters
        model_output = {
            "logits": logits[: len(row)].float().unsqueeze(0),
            "input_ids": torch.tensor([encoding.ids]),
            "offset_mapping": torch.tensor([encoding.offsets]),
            "special_tokens_mask": torch.tensor([encoding.special_tokens_mask]),
            "sentence": tokenized.part.input,
        }
        strategy = AggregationStrategy(parameters.aggregation_strategy)
        entities = self._pipeline.postprocess([model_output], strategy, list(parameters.ignore_labels))
        return [{key: _plain(value) for key, value in entity.items()} for entity in entities]


def _plain(value: Any) -> Any:
    """Returns a NumPy or torch scalar as Python's."""
    return value.item() if hasattr(value, "item") else value
