"""Labels of texts in the form of TEI (``predict``)."""

from collections.abc import Sequence
from typing import Any

from torchserve_openvino.tasks.openai import RequestError
from torchserve_openvino.tasks.standard.form import (
    Counted,
    ModelFacts,
    TeiForm,
    TeiRequest,
    check_count,
    tei_request,
)


class PredictRequest(TeiRequest):
    """``POST predict``."""

    inputs: Any


class TeiPredict(TeiForm):
    """TEI's classification: a text, or a list of lists of one text; a list of two texts is a pair there."""

    def __init__(self, body: Any, model: ModelFacts) -> None:
        request = tei_request(PredictRequest, body, model, raw_scores=(False,))
        self.many = isinstance(request.inputs, list)
        self.inputs = [request.inputs]
        if self.many:
            check_count(len(request.inputs), model, self.field)
            self.inputs = [_text(item, f"{self.field}[{number}]") for number, item in enumerate(request.inputs)]
        self.truncates = request.truncate or None

    def answer(self, answers: Sequence[Counted]) -> Any:
        """Returns the labels with their scores, best first."""
        predictions = [
            [{"label": label, "score": score} for label, score in answer.answer.items()] for answer in answers
        ]
        return predictions if self.many else predictions[0]


def _text(entry: Any, field: str) -> Any:
    """Returns the text of an entry.

    Raises:
        RequestError: The entry is a pair of texts, or half of one.
    """
    if isinstance(entry, list) and len(entry) == 1:
        return entry[0]
    raise RequestError(
        f'{field}: pairs of texts are not served; send one text, or several as [["a"], ["b"]]', param=field,
        code="invalid_value",
    )  # fmt: skip
