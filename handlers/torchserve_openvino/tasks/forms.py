"""The forms of requests and answers, as pydantic models, and the JSON schema that is made of them."""

from collections.abc import Mapping
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema

from torchserve_openvino.tasks.catalog import TASKS
from torchserve_openvino.tasks.request_body import Parameters

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Answer(BaseModel):
    """Base of the objects in answers. They describe what tasks answer; answers themselves are plain dicts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Refusal(Answer):
    """What is answered to a request that is refused, or stands in a list of answers for one input of it."""

    code: int
    """The HTTP status."""
    type: str
    """The kind of error."""
    message: str
    """What is wrong, and what to do."""
    request_id: str = ""
    """The request's id, if all of it is refused; the log names it."""


class Scored(Answer):
    """A label with its score."""

    label: str
    """The label."""
    score: float
    """Its score."""


class HasForms(Protocol):
    """A task's class, as far as its schema is made of it; see `HubHandler`.

    A task whose requests have another form than ``{"inputs": ..., "parameters": ...}`` has a type ``request`` besides.
    """

    task: str
    parameters: type[Parameters]
    takes: Any
    answers: Any
    explanation_parameters: type[Parameters] | None
    explanations: Any
    fields: frozenset[str]
    flat: str


def schema_of(handler: type[HasForms]) -> dict[str, Any]:
    """Returns the JSON schema of a task's requests and answers.

    Returns:
        A schema with ``request``, ``answer`` (to one input) and ``answers`` (to a list of inputs) under ``$defs``, and
        ``explanation_request`` and ``explanation`` where the task has explanations.
    """
    forms = [
        (
            "request",
            "validation",
            TypeAdapter(getattr(handler, "request", None) or _request("", handler, handler.parameters)),
        ),
        ("answer", "serialization", TypeAdapter(handler.answers)),
        ("refusal", "serialization", TypeAdapter(Refusal)),
    ]
    if handler.explanation_parameters is not None:
        explanation = _request("Explained", handler, handler.explanation_parameters)
        forms.append(("explanation_request", "validation", TypeAdapter(explanation)))
        forms.append(("explanation", "serialization", TypeAdapter(handler.explanations)))
    schemas, common = TypeAdapter.json_schemas(forms, schema_generator=_Untitled)  # type: ignore[arg-type]
    definitions: Mapping[str, Any] = {name: schema for (name, _), schema in schemas.items()}
    item = {"anyOf": [_ref("answer"), _ref("refusal")]}
    about = TASKS[handler.task]
    return {
        "$schema": _DIALECT,
        "title": handler.task,
        "description": f"Takes {about.inputs}; answers {about.outputs}.",
        "type": "object",
        "properties": {
            "request": _ref("request"),
            "answer": {"anyOf": [_ref("answer"), _ref("answers"), _ref("refusal")]},
        },
        "$defs": {**common.get("$defs", {}), **definitions, "answers": {"type": "array", "items": item}},
    }


def _request(name: str, handler: type[HasForms], parameters: Any) -> Any:
    """Returns the type of a request with some parameters, whose models' names begin with ``name``."""
    needed = any(field.is_required() for field in parameters.model_fields.values())
    settings: Any = (parameters, ...) if needed else (parameters | None, None)
    takes: Any = handler.takes
    inputs: Any = takes | Annotated[list[takes], Field(min_length=1)]
    strict = ConfigDict(extra="forbid")
    request: Any = create_model(f"{name}Request", __config__=strict, inputs=(inputs, ...), parameters=settings)
    if handler.fields:
        # Such an input needs no "inputs" around it.
        request |= create_model(f"{name}Input", __base__=takes, parameters=settings)
    if handler.flat and not name:
        # Of such a request, the parameters stand beside the input.
        flat: Any = {handler.flat: (inputs, ...)}
        request |= create_model("Prompt", __base__=parameters, **flat)
    return request


class _Untitled(GenerateJsonSchema):
    """Leaves out titles of fields, which only repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Returns False."""
        return False


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}
