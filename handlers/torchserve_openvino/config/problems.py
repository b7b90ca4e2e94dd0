"""Collects all problems of a configuration, so that the user fixes them in one go; pydantic's errors become ours."""

from collections.abc import Callable
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from torchserve_openvino.config.fields import Misspelt
from torchserve_openvino.config.spelling import listed, nearest, shown
from torchserve_openvino.errors import ConfigError

KeyPath = tuple[str | int, ...]


def dotted(path: KeyPath) -> str:
    """Formats ``("warmup", "inputs", 0, "shape")`` as ``warmup.inputs[0].shape``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _line(problem: ConfigError) -> int:
    """Returns the line of a problem, to sort by position in the file; 0 if it has none."""
    tail = problem.place.rpartition(":")[2]
    return int(tail) if tail.isdigit() else 0


class ConfigErrors(ConfigError):
    """Several problems of one configuration.

    Attributes:
        problems: One `ConfigError` (or subclass) for each.
    """

    def __init__(self, problems: tuple[ConfigError, ...], *, place: str = "") -> None:
        self.problems = problems
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"{len(problems)} problems:{lines}", place=place)


class Problems:
    """A list of errors to be raised at once, each with its key and the place of that key.

    Args:
        place_of: Returns where a key was set, e.g. ``model-config.yaml:7``.
        prefix: Path prepended to every key.
    """

    def __init__(self, place_of: Callable[[KeyPath], str], prefix: KeyPath = ()) -> None:
        self._place_of = place_of
        self._prefix = prefix
        self._found: list[ConfigError] = []

    def at(self, *keys: str | int) -> "Problems":
        """Returns a view of the same list, with a nested key added to the prefix."""
        nested = Problems(self._place_of, self._prefix + keys)
        nested._found = self._found
        return nested

    def place(self, *keys: str | int) -> str:
        """Returns where a nested key was set."""
        return self._place_of(self._prefix + keys)

    def add(
        self,
        keys: KeyPath,
        message: str,
        *,
        suggestion: str | None = None,
        kind: type[ConfigError] = ConfigError,
    ) -> None:
        """Adds a problem.

        Args:
            keys: Path of the offending key below the prefix.
            message: What is wrong, and how to fix it.
            suggestion: Nearest valid name.
            kind: Error class of this problem.
        """
        path = self._prefix + keys
        self._found.append(kind(message, key=dotted(path), place=self._place_of(path), suggestion=suggestion))

    def __len__(self) -> int:
        return len(self._found)

    def raise_if_any(self, place: str = "") -> None:
        """Raises a single problem as it is, several as one `ConfigErrors`.

        Args:
            place: Name of the whole configuration.
        """
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise ConfigErrors(tuple(sorted(self._found, key=_line)), place=place)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is not None:
        return next((found for each in get_args(annotation) if (found := _model_in(each))), None)
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
    given = entry.get("input")
    if kind == "extra_forbidden":
        valid = list(_model_at(model, loc[:-1]).model_fields)
        return f"unknown key; valid keys: {listed(valid)}.", nearest(str(loc[-1]), valid)
    if kind == "missing":
        return "is missing.", None
    if kind == "literal_error":
        allowed = [word.strip().strip("'") for word in str(context["expected"]).replace(" or ", ",").split(",")]
        return f"must be one of {listed(allowed)}, not {shown(given)}.", nearest(str(given), allowed)
    if kind == "value_error":
        cause = context.get("error")
        return str(cause), cause.suggestion if isinstance(cause, Misspelt) else None
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        return f"must be a mapping, not {shown(given)}.", None
    if kind in {"list_type", "tuple_type"}:
        return f"must be a list, not {shown(given)}.", None
    text = str(entry["msg"]).removeprefix("Input should ").rstrip(".")
    text = f"must {text}" if text != entry["msg"].rstrip(".") else text
    return f"{text}, not {shown(given)}.", None
