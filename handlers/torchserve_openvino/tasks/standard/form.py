"""`Form`: a request as a standard client writes it, and how that client reads the answer and a refusal."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from torchserve_openvino.errors import InvalidInputError, ItemError, PayloadTooLargeError
from torchserve_openvino.serving.requests.isolation import isolated
from torchserve_openvino.serving.requests.refusals import RefusalForm
from torchserve_openvino.tasks.arrays import Arrays
from torchserve_openvino.tasks.openai import (
    MODELS,
    STRICT,
    RequestError,
    check_model,
    models_body,
    openai_error,
    request_of,
    unknown_path,
)
from torchserve_openvino.tasks.request_body import OWN_FIELDS
from torchserve_openvino.tasks.standard.refusal_forms import tei_error

_VERSIONS = ("v1/", "v2/")
T = TypeVar("T")


@dataclass(frozen=True)
class ModelFacts:
    """What a form depends on of the model.

    Attributes:
        name: Its name on the server.
        loaded: When it was loaded, in seconds since 1970.
        max_inputs: Most inputs in one request.
        normalizes: Whether its vectors have length 1.
        sparse: Whether its vectors have a weight for each word of the vocabulary, most of them 0.
    """

    name: str
    loaded: float
    max_inputs: int
    normalizes: bool = False
    sparse: bool = False


@dataclass(frozen=True)
class Counted:
    """The answer to one input.

    Attributes:
        answer: As the task answers in its own form.
        tokens: Tokens that ran for it, without padding.
    """

    answer: Any
    tokens: int


class Form(ABC):
    """One request in a standard form.

    Attributes:
        inputs: What it asks of the task, each in the task's own form.
        parameters: The task's own parameters.
        truncates: Whether the end of a text that is too long is dropped; None leaves it to the YAML.
        field: The field with the inputs, for refusals.
        many: Whether the inputs came as a list.
    """

    inputs: Sequence[Any] = ()
    parameters: Mapping[str, Any] = {}
    truncates: bool | None = None
    field = "inputs"
    many = False

    @abstractmethod
    def __init__(self, body: Any, model: ModelFacts) -> None:
        """Reads a request.

        Args:
            body: The parsed JSON.
            model: The model that it was sent to.

        Raises:
            ItemError: It is no such request; the message names the field.
        """

    @abstractmethod
    def answer(self, answers: Sequence[Counted]) -> Any:
        """Returns the body of the answer, in which tensors may stand for lists of numbers.

        Args:
            answers: Those to the inputs, in their order.

        Raises:
            ItemError: The request asks for what these answers do not have.
        """

    @staticmethod
    def refusal(error: ItemError) -> dict[str, Any]:
        """Returns the body of a refusal, as the client reads it."""
        return openai_error(error)

    def written(self, answers: Sequence[Any]) -> "FormAnswer":
        """Returns the answer to the request.

        Args:
            answers: A `Counted` or an `ItemError` for each input.

        Raises:
            ItemError: An input was refused: these forms have no room for the answers to the others.
        """
        for number, answer in enumerate(answers):
            if isinstance(answer, ItemError):
                raise _located(answer, f"{self.field}[{number}]" if self.many else self.field)
        return FormAnswer(self.answer(answers), self.refusal)


class FormAnswer(Arrays):
    """An answer in a standard form."""

    def __init__(self, value: Any, form: Any) -> None:
        super().__init__(value)
        self.refusal_form = form


def _located(error: ItemError, field: str) -> ItemError:
    """Returns the refusal of an input with the field that holds it."""
    if not isinstance(error, InvalidInputError):
        return error
    # A task that reads several texts names the one itself.
    message = str(error) if str(error).startswith(f"{field}[") else f"{field}: {error}"
    return RequestError(message, param=field, status=error.status)


def check_count(count: int, model: ModelFacts, field: str) -> None:
    """Limits the inputs of one request.

    Raises:
        RequestError: There are none, or too many.
    """
    if not count:
        raise RequestError(f"{field} is an empty list", param=field, code="invalid_value")
    if count > model.max_inputs:
        raise RequestError(
            f"{field} has {count} entries; the most is {model.max_inputs} (handler.openvino.text.max_inputs): send "
            "several requests, or raise it",
            param=field, status=PayloadTooLargeError.status,
        )  # fmt: skip


class ModelList(Form):
    """``GET v1/models`` and ``GET v1/models/NAME``."""

    def __init__(self, body: Any, model: ModelFacts) -> None:
        self._path, self._model = str(body), model

    def answer(self, answers: Sequence[Counted]) -> Any:
        """Returns the model, alone or as a list."""
        return models_body(_name(self._path), {self._model.name: self._model.loaded})


@dataclass(frozen=True)
class Endpoint:
    """A form that a task takes.

    Attributes:
        path: What follows model and version in the URL, without ``v1/``.
        form: The form.
        fields: Fields by which a request of this form is known among those that share the path.
        by_body: Whether these fields also decide at the model's own URL, where requests in the task's own form arrive.
    """

    path: str
    form: type[Form]
    fields: frozenset[str] = frozenset()
    by_body: bool = False


def is_model_list(path: str) -> bool:
    """Returns True if a path below a model asks for the list of models, or for one of it."""
    return _name(path).partition("/")[0] == MODELS


def form_for(endpoints: Sequence[Endpoint], path: str, body: Any) -> type[Form] | None:
    """Returns the form of a request; None for the task's own.

    Args:
        endpoints: What the task takes.
        path: What follows model and version in the URL.
        body: The parsed JSON.

    Raises:
        RequestError: The task has nothing under this path.
    """
    names = body.keys() if isinstance(body, Mapping) else frozenset()
    if not path:
        own = names & set(OWN_FIELDS)
        return next(
            (endpoint.form for endpoint in endpoints if endpoint.by_body and endpoint.fields <= names and not own), None
        )
    candidates = _at(endpoints, path)
    if candidates:
        return next(
            (candidate.form for candidate in candidates if candidate.fields and candidate.fields <= names),
            candidates[0].form,
        )
    if endpoints or path.startswith(_VERSIONS):
        known = ", ".join(f"v1/{path}" for path in dict.fromkeys([*(endpoint.path for endpoint in endpoints), MODELS]))
        raise unknown_path(path, f"{known}, and the model itself")
    # A task without standard forms never looked at what follows the version.
    return None


def refusal_form(endpoints: Sequence[Endpoint], path: str) -> RefusalForm | None:
    """Returns how refusals are written under a path; None at the model's own URL."""
    default = openai_error if path.startswith(_VERSIONS) or endpoints else None
    return next((endpoint.form.refusal for endpoint in _at(endpoints, path)), default) if path else None


def _at(endpoints: Sequence[Endpoint], path: str) -> list[Endpoint]:
    """Returns the endpoints under a path, the usual one first: without a version, TEI's."""
    matching = [endpoint for endpoint in endpoints if endpoint.path == _name(path)]
    has_version = path.startswith(_VERSIONS)
    return sorted(matching, key=lambda endpoint: issubclass(endpoint.form, TeiForm) is has_version)


def in_form(refusal: RefusalForm | None, run: Callable[[], T]) -> T:
    """Returns the result of ``run``.

    Args:
        refusal: Makes the body of a refusal; None for this package's own form.
        run: Reads or writes one request.

    Raises:
        ItemError: ``run`` failed; the error is sent in that form.
    """
    result = isolated(run)
    if isinstance(result, ItemError):
        result.form = refusal
        raise result
    return result


def _name(path: str) -> str:
    """Returns a path without the version of its protocol; a model's own version may be called v1."""
    return next((path.removeprefix(version) for version in _VERSIONS if path.startswith(version)), path)


# --- what the endpoints of TEI (Hugging Face's text-embeddings-inference) share: fields, and errors ---------------


_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {"truncation_direction": ("right", "Right")}


class TeiRequest(BaseModel):
    """What requests to its endpoints share; ``model`` is not TEI's, but names one where several are served."""

    model_config = STRICT

    model: str | None = None
    truncate: bool = False


_Tei = TypeVar("_Tei", bound=TeiRequest)


def tei_request(kind: type[_Tei], body: Any, model: ModelFacts, **unsupported: tuple[Any, ...]) -> _Tei:
    """Checks a request to an endpoint of TEI.

    Args:
        kind: The fields that are read.
        body: The parsed JSON.
        model: The model that is served.
        unsupported: Further fields that are not supported, each with the values that ask for nothing.

    Raises:
        RequestError: See `request_of`; or it names another model.
    """
    request = request_of(kind, body, {**_UNSUPPORTED, **unsupported})
    check_model(request.model, model.name)
    return request


class TeiForm(Form):
    """A request to an endpoint of TEI."""

    @staticmethod
    def refusal(error: ItemError) -> dict[str, Any]:
        """Returns the body of a refusal as TEI has it."""
        return tei_error(error)
