"""Requests in the format of Hugging Face's inference API: ``{"inputs": ..., "parameters": {...}}``, or a bare input."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from torchserve_openvino.config.spelling import listed, nearest
from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError
from torchserve_openvino.serving.requests.json_body import check_json, parse_json

TEXT = "handler.openvino.text"
# Fields that hold the inputs of a request; the first that is there counts.
OWN_FIELDS = ("inputs", "data", "text")
# What clients of other servers add.
_IGNORED = frozenset({"input", "model", "options"})

_P = TypeVar("_P", bound="Parameters")


class Parameters(BaseModel):
    """Base of the parameters that a task takes with each request; unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True)
class RequestBody:
    """What one request asks.

    Attributes:
        inputs: One or more inputs.
        parameters: Parameters for all of them, not checked yet.
        many: Whether the inputs came as a list, and the answers go back as one.
        form: The standard form of the request (`standard.form.Form`); None for the task's own.
    """

    inputs: list[Any]
    parameters: Mapping[str, Any]
    many: bool
    form: Any = None


def parse_body(
    value: Any, *, max_bytes: int, max_inputs: int, fields: frozenset[str], key: str = f"{TEXT}.max_bytes"
) -> RequestBody:
    """Reads a request's body.

    Args:
        value: Bytes or text: a bare input, or JSON; or JSON that TorchServe has parsed.
        max_bytes: Largest body in bytes.
        max_inputs: Most inputs in a list.
        fields: Names by which an input that is an object is known without ``inputs`` around it.
        key: The configuration key that sets ``max_bytes``.

    Raises:
        PayloadTooLargeError: The body is too large, or the list too long.
        InvalidInputError: The body is empty, or an object with other keys.
    """
    return ask_in(parsed(value, max_bytes, key), max_inputs=max_inputs, fields=fields)


def ask_in(value: Any, *, max_inputs: int, fields: frozenset[str]) -> RequestBody:
    """Reads a body that is parsed; see `parse_body`."""
    parameters: Any = {}
    if isinstance(value, Mapping):
        value, parameters = _inputs_of(value, fields)
    many = isinstance(value, list)
    inputs = list(value) if many else [value]
    if not inputs:
        raise InvalidInputError("inputs is an empty list")
    if len(inputs) > max_inputs:
        raise PayloadTooLargeError(f"{len(inputs)} inputs in one request; the most is {max_inputs}: send several")
    return RequestBody(inputs, parameters, many)


def _inputs_of(value: Mapping[str, Any], fields: frozenset[str]) -> tuple[Any, Mapping[str, Any]]:
    """Returns the inputs and the parameters of a JSON object."""
    parameters = value.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise InvalidInputError(f"parameters must be an object, not {type(parameters).__name__}")
    for name in OWN_FIELDS:
        if name in value:
            if others := value.keys() - _IGNORED - {name, "parameters"}:
                other = min(others)
                hint = "Did you mean 'parameters'?" if nearest(other, ["parameters"]) else (
                    f"Beside {name!r} there is only 'parameters', an object with what the task takes."
                )  # fmt: skip
                raise InvalidInputError(f"there is no field {other!r}. {hint}")
            return value[name], parameters
    if fields and fields <= value.keys():
        return {name: item for name, item in value.items() if name != "parameters"}, parameters
    keys = ", ".join(map(repr, list(value)[:5])) or "no key"
    alternatives = f" or {listed(sorted(fields))}" if fields else ""
    raise InvalidInputError(f'the JSON object needs "inputs"{alternatives}; it has {keys}')


def parsed(value: Any, max_bytes: int, key: str) -> Any:
    """Returns the JSON of a body, or its text if it is none.

    Args:
        value: Bytes, text, or JSON that TorchServe has parsed.
        max_bytes: Largest body in bytes.
        key: The configuration key that sets it.

    Raises:
        PayloadTooLargeError: The body is too large.
        InvalidInputError: It is nested too deep, or not UTF-8.
    """
    if isinstance(value, (bytes, bytearray, str)):
        if len(value) > max_bytes:
            raise PayloadTooLargeError(f"the request has {len(value)} bytes, more than {key} {max_bytes}")
        text = value if isinstance(value, str) else _decoded(bytes(value))
        if text.lstrip()[:1] not in {"{", "["}:
            return text
        try:
            value = parse_json(text)
        except InvalidInputError as error:
            if isinstance(error.__cause__, json.JSONDecodeError):
                # A text may begin with a bracket.
                return text
            raise
    # TorchServe parses JSON before it calls a handler, so that its size is not known any more.
    check_json(value, max_bytes=max_bytes, key=key)
    return value


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"the body is not UTF-8 text: {error.reason} at byte {error.start}") from error


def parameters_of(kind: type[_P], values: Mapping[str, Any]) -> _P:
    """Checks a request's parameters.

    Raises:
        InvalidInputError: A parameter is unknown or has a value that is not valid; the message names it.
    """
    check_characters(values, "parameters")
    unknown = next((name for name in values if name not in kind.model_fields), None)
    if unknown is not None:
        known = sorted(kind.model_fields)
        hint = nearest(str(unknown), known)
        valid = f"valid parameters: {listed(known)}" if known else "this task takes none"
        raise InvalidInputError(f"unknown parameter {unknown!r}; {valid}.{f' Did you mean {hint!r}?' if hint else ''}")
    return checked(lambda: kind.model_validate(dict(values)), "parameters")


def checked(read: Callable[[], Any], what: str) -> Any:
    """Calls a pydantic validation.

    Raises:
        InvalidInputError: It failed; the message names the first field that is wrong.
    """
    try:
        return read()
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        location = ".".join(map(str, (what, *first["loc"])))
        raise InvalidInputError(f"{location}: {first['msg'][:1].lower()}{first['msg'][1:]}") from error


def check_characters(value: Any, what: str) -> None:
    """Checks the texts of a parsed JSON value, which can hold half of a surrogate pair, as an escape.

    Raises:
        InvalidInputError: One does; it is no character, and no tokenizer takes it.
    """
    level = [value]
    while level:
        for item in level:
            if isinstance(item, str) and (at := _surrogate(item)) is not None:
                raise InvalidInputError(f"{what} holds half of a surrogate pair at {at}, which is no character")
        level = [inner for item in level for inner in _contents(item)]


def _surrogate(text: str) -> int | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _contents(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []
