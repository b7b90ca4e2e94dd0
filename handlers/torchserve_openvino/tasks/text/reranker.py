"""Orders texts by how well they answer a query, with a cross-encoder."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from torchserve_openvino.errors import InvalidInputError, ModelLoadError, NonFiniteOutputError
from torchserve_openvino.serving.verification.measures import Independent, Measure
from torchserve_openvino.tasks.forms import Answer
from torchserve_openvino.tasks.hub_handler import RequestInput, text_of
from torchserve_openvino.tasks.request_body import Parameters, checked
from torchserve_openvino.tasks.standard.form import Endpoint
from torchserve_openvino.tasks.standard.ranking import DocumentRanking, TeiRanking
from torchserve_openvino.tasks.text.text_handler import Outputs, TextHandler, TokenizedInput


class RankParameters(Parameters):
    """Parameters of a ranking."""

    raw_scores: bool = False
    """Whether scores are the model's own numbers; else they lie between 0 and 1."""
    return_text: bool = False
    """Whether each entry of the answer has its text."""


class Ranking(BaseModel):
    """What one input asks: a query, and the texts to order."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    query: str
    texts: list[str]


class Ranked(Answer):
    """A text's place in the order."""

    index: int
    """Its number in the request."""
    score: float
    """Its score."""
    text: str = ""
    """The text, for `return_text`."""


class Reranker(TextHandler):
    """The texts of a request in order, best first."""

    task = "reranker"
    parameters = RankParameters
    takes = Ranking
    answers = list[Ranked]
    fields = frozenset({"query", "texts"})
    endpoints = (
        Endpoint("rerank", DocumentRanking, frozenset({"query", "documents"}), by_body=True),
        Endpoint("rerank", TeiRanking, frozenset({"texts"})),
    )

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet."""
        return Independent()

    def read_archive(self) -> None:
        """Loads the model, which has to return one number.

        Raises:
            ModelLoadError: It returns several.
        """
        super().read_archive()
        if len(self.labels) > 1:
            raise ModelLoadError(
                f"{type(self.model).__name__} has {len(self.labels)} labels; a reranker returns one score. Serve it as "
                "text_classifier."
            )

    def characters(self, part: RequestInput) -> int:
        """Returns the characters of the query and of a text, for each text."""
        ranking = part.input if isinstance(part.input, Mapping) else {}
        query, texts = ranking.get("query"), ranking.get("texts")
        if not isinstance(query, str) or not isinstance(texts, list):
            return 0
        return len(texts) * len(query) + sum(len(text) for text in texts if isinstance(text, str))

    def read(self, part: RequestInput) -> Ranking:
        """Returns a query and its texts."""
        ranking: Ranking = checked(lambda: Ranking.model_validate(part.input), "inputs")
        text_of(ranking.query, "query")
        if not ranking.texts:
            raise InvalidInputError("texts is an empty list")
        self.refuse_too_many(len(ranking.texts), "texts")
        for number, text in enumerate(ranking.texts):
            text_of(text, f"texts.{number}")
        return ranking

    def texts(self, part: RequestInput) -> tuple[list[str], list[str] | None, Any]:
        """Returns the query with each text."""
        return [part.input.query] * len(part.input.texts), list(part.input.texts), None

    def refused_row(self, part: RequestInput, number: int, error: InvalidInputError) -> InvalidInputError:
        """Returns the refusal of a ranking of which one text is too long."""
        return InvalidInputError(f"{part.form.field if part.form is not None else 'texts'}[{number}]: {error}")

    def answer(self, tokenized: TokenizedInput, outputs: Sequence[Outputs]) -> list[dict[str, Any]]:
        """Returns ``[{index, score}]``, best first."""
        parameters, ranking = tokenized.part.parameters, tokenized.part.input
        numbers = torch.stack([output[0].float().reshape(-1)[0] for output in outputs])
        if bool(numbers.isnan().any()):
            raise NonFiniteOutputError("the model's scores are not numbers for this input")
        scores = (numbers if parameters.raw_scores else torch.sigmoid(numbers)).tolist()
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        return [
            {"index": index, "score": scores[index]}
            | ({"text": ranking.texts[index]} if parameters.return_text else {})
            for index in order
        ]
