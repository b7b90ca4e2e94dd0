"""JSON that someone else wrote, where whatever is wrong with it is one kind of error; and numbers that JSON has not."""

import json
import math
from pathlib import Path
from typing import Any

# Far above any configuration or index of weights; parsed, it may take thirty times as much memory.
MAX_BYTES = 64 * 2**20


class JsonError(ValueError):
    """Text that is not JSON, or that is nested too deeply, has too many digits, holds NaN, or is too long."""


def parse_json(text: str | bytes, *, allow_nan: bool = False, most: int | None = None) -> Any:
    """Parses JSON.

    Args:
        text: The text, or its UTF-8.
        allow_nan: Whether NaN is accepted, which equals nothing. ``Infinity``, which Python's own writer makes, is.
        most: Largest size in bytes; `MAX_BYTES` if None.

    Raises:
        JsonError: It is not valid; the message says why, without the text.
    """
    most = MAX_BYTES if most is None else most
    if len(text) > most:
        raise JsonError(f"it has {len(text)} bytes, more than {most}")
    try:
        return json.loads(text, parse_constant=float if allow_nan else _without_nan)
    except JsonError:
        raise
    except RecursionError:
        raise JsonError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise JsonError(f"it is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        # Python bounds the digits of an integer, since reading them takes quadratic time.
        raise JsonError(f"it holds a number with too many digits ({error})") from error


def read_json(path: Path, *, allow_nan: bool = False) -> Any:
    """Reads a JSON file, as `parse_json` does.

    Raises:
        JsonError: It is not valid, or too large; the message names the file.
        OSError: It can't be read.
    """
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    try:
        return parse_json(content, allow_nan=allow_nan)
    except JsonError as error:
        raise JsonError(f"{path.name} is not valid JSON: {error}") from error


def read_json_object(path: Path, *, allow_nan: bool = False) -> dict[str, Any]:
    """Reads a JSON file that must hold an object. Raises as `read_json`."""
    value = read_json(path, allow_nan=allow_nan)
    if not isinstance(value, dict):
        raise JsonError(f"{path.name} must hold a JSON object, not a value of type {type(value).__name__}")
    return value


def with_names(value: Any) -> Any:
    """Returns plain data whose numbers that JSON does not have are their names: ``inf``, ``-inf``, ``nan``."""
    if isinstance(value, dict):
        return {name: with_names(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_names(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _without_nan(name: str) -> float:
    if name == "NaN":
        raise JsonError("it holds NaN")
    return float(name)
