"""Rankings in the forms of Cohere and Jina (``v2/rerank``, ``v1/rerank``) and of TEI (``rerank``)."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field

from torchserve_openvino.errors import ItemError
from torchserve_openvino.serving.requests.refusals import plain_refusal
from torchserve_openvino.tasks.hub_handler import text_of
from torchserve_openvino.tasks.openai import IGNORED, STRICT, RequestError, check_model, request_of
from torchserve_openvino.tasks.standard.form import (
    Counted,
    Form,
    ModelFacts,
    TeiForm,
    TeiRequest,
    check_count,
    tei_request,
)

_TEXT = "text"
# Fields of Cohere's and Jina's, with the values that ask for nothing.
_NOT_HERE: Mapping[str, tuple[Any, ...]] = {
    "rank_fields": ([_TEXT],), "max_chunks_per_doc": (), "max_tokens_per_doc": (), "relevant_spans": (),
    "truncation": (False,), "return_embeddings": (False,),
}  # fmt: skip


class DocumentsRequest(BaseModel):
    """``POST v2/rerank`` and ``POST v1/rerank``."""

    model_config = STRICT

    query: str
    documents: list[Any]
    model: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False


class TextsRequest(TeiRequest):
    """``POST rerank`` of TEI."""

    query: str
    texts: list[Any]
    raw_scores: bool = False
    return_text: bool = False


class DocumentRanking(Form):
    """Cohere's and Jina's ranking, whose clients read the same fields."""

    field = "documents"

    def __init__(self, body: Any, model: ModelFacts) -> None:
        request = request_of(DocumentsRequest, body, _NOT_HERE, IGNORED | {"priority"})
        check_model(request.model, model.name)
        check_count(len(request.documents), model, self.field)
        texts = [_text(document, f"{self.field}[{number}]") for number, document in enumerate(request.documents)]
        self.inputs = [{"query": text_of(request.query, "query"), "texts": texts}]
        self._request, self._model = request, model

    def answer(self, answers: Sequence[Counted]) -> Any:
        """Returns the best documents, best first, and how many tokens ran."""
        (counted,) = answers
        best = counted.answer[: self._request.top_n]
        return {
            "id": uuid.uuid4().hex,
            "object": "list",
            "model": self._model.name,
            "results": [self._result(entry["index"], entry["score"]) for entry in best],
            "meta": {"tokens": {"input_tokens": counted.tokens}},
            "usage": {"prompt_tokens": counted.tokens, "total_tokens": counted.tokens},
        }

    def _result(self, index: int, score: float) -> dict[str, Any]:
        result = {"index": index, "relevance_score": score}
        if not self._request.return_documents:
            return result
        document = self._request.documents[index]
        return {**result, "document": {_TEXT: document} if isinstance(document, str) else document}

    @staticmethod
    def refusal(error: ItemError) -> dict[str, Any]:
        """Returns the body of a refusal: this package's own has the ``message`` that Cohere's clients read."""
        return plain_refusal(error)


class TeiRanking(TeiForm):
    """TEI's ranking, which is the task's own but for where its parameters stand."""

    field = "texts"

    def __init__(self, body: Any, model: ModelFacts) -> None:
        request = tei_request(TextsRequest, body, model)
        check_count(len(request.texts), model, self.field)
        texts = [text_of(text, f"{self.field}[{number}]") for number, text in enumerate(request.texts)]
        self.inputs = [{"query": text_of(request.query, "query"), "texts": texts}]
        self.parameters = {"raw_scores": request.raw_scores, "return_text": request.return_text}
        self.truncates = request.truncate or None

    def answer(self, answers: Sequence[Counted]) -> Any:
        """Returns the texts, best first."""
        return answers[0].answer


def _text(document: Any, field: str) -> str:
    """Returns the text of a document.

    Raises:
        RequestError: It is neither a text nor an object with one.
    """
    if isinstance(document, Mapping):
        if _TEXT not in document:
            raise RequestError(f'{field} has no "{_TEXT}"', param=field, code="invalid_value")
        return text_of(document[_TEXT], f"{field}.{_TEXT}")
    return text_of(document, field)
