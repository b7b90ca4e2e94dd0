"""What tasks with endpoints in OpenAI's form share: paths below the model's, and errors as its clients read them."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from torchserve_openvino.config.spelling import listed, nearest
from torchserve_openvino.errors import BusyError, InvalidInputError, ItemError
from torchserve_openvino.serving.requests.refusals import shortened

LAST_EVENT = "data: [DONE]\n\n"
MODELS = "models"

# Of the bodies of requests.
STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
# OpenAI's fields that change nothing here, whatever they say.
IGNORED = frozenset({"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"})

_Request = TypeVar("_Request", bound=BaseModel)


class NestedObject(BaseModel):
    """An object within a request. As in the request itself, null is a field that is left out.

    Clients send back what they were sent: a message of an answer has ``refusal: null``.
    """

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: field for name, field in value.items() if field is not None}
        return value


class RequestError(InvalidInputError):
    """A request that asks for what can't be had.

    Args:
        message: What is wrong, and what to do.
        param: The field that is wrong, as in ``messages[0].content``; empty if it is none.
        code: OpenAI's word for the kind of error; empty for none.
        status: The HTTP status.
    """

    def __init__(self, message: str, *, param: str = "", code: str = "", status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def unknown_path(path: str, known: str) -> RequestError:
    """Returns the refusal of a request to a path under which nothing is served."""
    return RequestError(f"there is no endpoint {path!r}; there are {known}", code="unknown_url", status=404)


def openai_error(error: ItemError) -> dict[str, Any]:
    """Returns the body of a refusal as OpenAI's clients read it."""
    kind = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    about = error if isinstance(error, RequestError) else None
    code = about.code if about is not None else "overloaded" if isinstance(error, BusyError) else ""
    param = about.param if about is not None else ""
    return {"error": {"message": shortened(str(error)), "type": kind, "param": param or None, "code": code or None}}


def unknown_model(name: str, own: str) -> RequestError:
    """Returns the refusal of a request for another model than this endpoint's."""
    return RequestError(
        f"the model {name!r} does not exist here; this endpoint serves {own!r}", param="model",
        code="model_not_found", status=404,
    )  # fmt: skip


def check_model(name: str | None, own: str) -> None:
    """Refuses a request for another model than this endpoint's.

    Raises:
        RequestError: It names one.
    """
    if name is not None and name != own:
        raise unknown_model(name, own)


def models_body(endpoint: str, names: Mapping[str, float]) -> dict[str, Any]:
    """Returns the answer to ``GET v1/models`` or ``GET v1/models/NAME``.

    Args:
        endpoint: ``models`` or ``models/NAME``.
        names: The models that are served, with the time when each was loaded, in seconds since 1970.

    Raises:
        RequestError: It names another model.
    """
    models = {
        name: {"id": name, "object": "model", "created": int(created), "owned_by": "torchserve-openvino"}
        for name, created in names.items()
    }
    _, _, name = endpoint.partition("/")
    if not name:
        return {"object": "list", "data": list(models.values())}
    if name not in models:
        raise unknown_model(name, ", ".join(models))
    return models[name]


def request_of(
    kind: type[_Request], body: Any, unsupported: Mapping[str, tuple[Any, ...]], ignored: frozenset[str] = IGNORED
) -> _Request:
    """Checks a request that is a JSON object with its parameters beside its input.

    Args:
        kind: The fields that are read.
        body: The parsed JSON.
        unsupported: Fields that are not supported, each with the values that ask for nothing.
        ignored: Fields that change nothing, whatever they hold.

    Raises:
        RequestError: A field is unknown, unsupported, missing or has a value that is not valid; the error names it.
    """
    if not isinstance(body, Mapping):
        raise RequestError(f"the body must be a JSON object, not {type(body).__name__}")
    known = kind.model_fields
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if name in known:
            # As for OpenAI's, null is a field that is left out.
            fields |= {} if value is None and not known[name].is_required() else {name: value}
        elif name not in ignored and value is not None:
            _refuse_other(str(name), value, unsupported, [*known, *unsupported])
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = _path(first["loc"], known)
        reason = str(first["msg"]).removeprefix("Value error, ")
        raise RequestError(f"{param}: {reason[:1].lower()}{reason[1:]}", param=param, code="invalid_value") from error


def _refuse_other(name: str, value: Any, unsupported: Mapping[str, tuple[Any, ...]], known: list[str]) -> None:
    """Refuses a field that is unknown, or not supported with this value."""
    if name not in unsupported:
        hint = nearest(name, known)
        raise RequestError(
            f"unknown field {name!r}.{f' Did you mean {hint!r}?' if hint else ''}", param=name, code="unknown_field"
        )
    # JSON has no 0 that is not also 0.0; but True equals 1 in Python.
    neutral = unsupported[name]
    if any(
        value == neutral_value and isinstance(value, bool) == isinstance(neutral_value, bool)
        for neutral_value in neutral
    ):
        return
    instead = f", or set it to {listed([repr(neutral_value) for neutral_value in neutral])}" if neutral else ""
    raise RequestError(f"{name} is not supported here: leave it out{instead}", param=name, code="unsupported_field")


def _path(location: tuple[int | str, ...], known: Mapping[str, Any]) -> str:
    """Returns where a value is wrong, as in ``messages[0].content``; names of types in a union are left out."""
    path = ""
    for depth, step in enumerate(location):
        if isinstance(step, int):
            path += f"[{step}]"
        elif depth == 0 and step in known:
            path = step
        elif step.isidentifier() and step not in {"str", "int", "float", "bool"}:
            path += f".{step}"
    return path
