"""Embeddings in the forms of OpenAI (``v1/embeddings``) and of TEI (``embed``, ``embed_sparse``)."""

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field

from torchserve_openvino.tasks.openai import STRICT, RequestError, check_model, request_of
from torchserve_openvino.tasks.standard.form import (
    Counted,
    Form,
    ModelFacts,
    TeiForm,
    TeiRequest,
    check_count,
    tei_request,
)

Width = Annotated[int, Field(ge=1, le=2**31 - 1)]


class EmbeddingsRequest(BaseModel):
    """``POST v1/embeddings``."""

    model_config = STRICT

    input: Any
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Width | None = None


class EmbedRequest(TeiRequest):
    """``POST embed``."""

    inputs: Any
    normalize: bool = True
    dimensions: Width | None = None


class EmbedSparseRequest(TeiRequest):
    """``POST embed_sparse``."""

    inputs: Any


class WordWeight(BaseModel):
    """The weight of one word in a sparse vector."""

    index: int
    """Place of the word in the vocabulary."""
    value: float
    """Its weight, above 0."""


class OpenAIEmbeddings(Form):
    """OpenAI's embeddings."""

    field = "input"

    def __init__(self, body: Any, model: ModelFacts) -> None:
        request = request_of(EmbeddingsRequest, body, {})
        check_model(request.model, model.name)
        _check_dense(model)
        self.inputs, self.many = _inputs(request.input, self.field, model)
        self._request, self._model = request, model

    def answer(self, answers: Sequence[Counted]) -> Any:
        """Returns the list of vectors, and how many tokens ran."""
        request = self._request
        vectors = [shortened(answer.answer.value, request.dimensions) for answer in answers]
        # OpenAI scales the vectors that it shortens.
        vectors = vectors if request.dimensions is None else list(map(unit, vectors))
        tokens = sum(answer.tokens for answer in answers)
        return {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": number,
                    "embedding": _base64(vector) if request.encoding_format == "base64" else vector,
                }
                for number, vector in enumerate(vectors)
            ],
            "model": self._model.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


class TeiEmbed(TeiForm):
    """TEI's embeddings: the bare vectors, always in a list."""

    def __init__(self, body: Any, model: ModelFacts) -> None:
        request = tei_request(EmbedRequest, body, model, prompt_name=())
        _check_dense(model)
        if model.normalizes and not request.normalize:
            raise RequestError(
                "normalize: false is not possible: this model's own files normalize its vectors. Leave it out",
                param="normalize",
            )
        self.inputs, self.many = _inputs(request.inputs, self.field, model)
        self._request, self.truncates = request, request.truncate or None

    def answer(self, answers: Sequence[Counted]) -> Any:
        """Returns the vectors."""
        vectors = [shortened(answer.answer.value, self._request.dimensions) for answer in answers]
        return [unit(vector) if self._request.normalize else vector for vector in vectors]


class TeiEmbedSparse(TeiForm):
    """TEI's sparse embeddings: of each text, the words with a weight."""

    def __init__(self, body: Any, model: ModelFacts) -> None:
        request = tei_request(EmbedSparseRequest, body, model, prompt_name=())
        if not model.sparse:
            raise RequestError("this model's vectors are not sparse: ask /embed or /v1/embeddings")
        self.inputs, self.many = _inputs(request.inputs, self.field, model)
        self.truncates = request.truncate or None

    def answer(self, answers: Sequence[Counted]) -> Any:
        """Returns the words' weights."""
        return [word_weights(answer.answer.value) for answer in answers]


def _check_dense(model: ModelFacts) -> None:
    """Refuses a form that has no place for sparse vectors.

    Raises:
        RequestError: The model's vectors are sparse.
    """
    if model.sparse:
        raise RequestError("this model's vectors are sparse: ask /embed_sparse, or TorchServe's own form")


def word_weights(vector: torch.Tensor) -> list[dict[str, Any]]:
    """Returns the numbers of a vector that are not 0 in the form of `WordWeight`, in the order of the vocabulary."""
    (places,) = vector.nonzero(as_tuple=True)
    pairs = zip(places.tolist(), vector[places].tolist(), strict=True)
    return [{"index": index, "value": value} for index, value in pairs]


def _inputs(value: Any, field: str, model: ModelFacts) -> tuple[list[Any], bool]:
    """Returns inputs, each a text or a list of token ids, and whether they came as a list.

    Raises:
        RequestError: They are something else, or too many; the error names the entry.
    """
    if isinstance(value, str):
        return [value], False
    if not isinstance(value, list):
        raise RequestError(
            f"{field} must be a text, a list of texts, a list of token ids or a list of lists of token ids, not "
            f"{'an object' if isinstance(value, Mapping) else type(value).__name__}",
            param=field, code="invalid_value",
        )  # fmt: skip
    if value and _is_number(value[0]):
        return [value], False
    check_count(len(value), model, field)
    return value, True


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shortened(vector: torch.Tensor, dimensions: int | None) -> torch.Tensor:
    """Returns the first numbers of a vector; all of them for None.

    Args:
        vector: float32 ``[width]``.
        dimensions: How many numbers to keep.

    Raises:
        RequestError: The vector has fewer.
    """
    if dimensions is not None and dimensions > len(vector):
        raise RequestError(
            f"dimensions is {dimensions}; this model's vectors have {len(vector)} numbers", param="dimensions",
            code="invalid_value",
        )  # fmt: skip
    return vector[:dimensions]


def unit(vector: torch.Tensor) -> torch.Tensor:
    """Returns a vector of the same direction and length 1; one of zeros stays as it is."""
    return torch.nn.functional.normalize(vector, dim=0)


def _base64(vector: torch.Tensor) -> str:
    """Returns a vector as base64 of its numbers: float32, the least significant byte first."""
    return base64.b64encode(vector.contiguous().numpy().astype("<f4").tobytes()).decode("ascii")
