"""Turns pydantic's errors into problems of our own."""

from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from torchserve_openvino.config.fields import UnknownWordError
from torchserve_openvino.config.problems import Problems
from torchserve_openvino.config.spelling import listed, nearest, shown


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is not None:
        return next((model for each in get_args(annotation) if (model := _model_in(each))), None)
    return None


def _model_at(model: type[BaseModel], loc: tuple[str | int, ...]) -> type[BaseModel]:
    for part in loc:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    return model


def note_errors(error: ValidationError, model: type[BaseModel], problems: Problems) -> None:
    """Adds each error of a failed validation to ``problems``.

    Args:
        error: What pydantic raised.
        model: The model that was validated against.
        problems: Collects the errors; its prefix is the path of the model.
    """
    for entry in error.errors(include_url=False):
        message, suggestion = _explain(entry, model)
        problems.add(tuple(entry["loc"]), message, suggestion=suggestion)


def _explain(entry: Any, model: type[BaseModel]) -> tuple[str, str | None]:
    kind, loc, context = entry["type"], entry["loc"], entry.get("ctx") or {}
    value = entry.get("input")
    if kind == "extra_forbidden":
        valid = list(_model_at(model, loc[:-1]).model_fields)
        return f"unknown key; valid keys: {listed(valid)}.", nearest(str(loc[-1]), valid)
    if kind == "missing":
        return "is missing.", None
    if kind == "literal_error":
        allowed = [word.strip().strip("'") for word in str(context["expected"]).replace(" or ", ",").split(",")]
        return f"must be one of {listed(allowed)}, not {shown(value)}.", nearest(str(value), allowed)
    if kind == "value_error":
        cause = context.get("error")
        return str(cause), cause.suggestion if isinstance(cause, UnknownWordError) else None
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        return f"must be a mapping, not {shown(value)}.", None
    if kind in {"list_type", "tuple_type"}:
        return f"must be a list, not {shown(value)}.", None
    text = str(entry["msg"]).removeprefix("Input should ").rstrip(".")
    text = f"must {text}" if text != entry["msg"].rstrip(".") else text
    return f"{text}, not {shown(value)}.", None
