"""Compares answers with those of eager PyTorch, whatever a task's answers look like."""

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from torchserve_openvino.tune.keys import mapping

# Of numbers in answers, relative to the largest number beside them; f32 is what `verify` demands by default.
TOLERANCES = {"auto": 3e-2, "f32": 1e-3, "bf16x3": 1e-3, "bf16": 3e-2, "f16": 1e-2}
# What OpenAI's answers name anew each time.
_OF_ONE_ANSWER = frozenset({"id", "created"})
# Numbers that are all smaller count as rounding of zero.
_LEAST_SCALE = 1e-3
_ARRAYS = (b"\x93NUMPY",)
# The first bytes of a PNG as base64.
_PNG = "iVBORw0K"
# Places in a picture, which are numbers of pixels. Other integers count or name something.
_BOX = frozenset({"xmin", "ymin", "xmax", "ymax"})


@dataclass(frozen=True)
class ModelAnswer:
    """One answer.

    Attributes:
        status: HTTP status.
        content_type: Its type.
        body: Its bytes.
    """

    status: int
    content_type: str
    body: bytes


def difference(expected: ModelAnswer, answer: ModelAnswer, precision: str) -> str | None:
    """Returns in what an answer differs from the expected one beyond the tolerance of a precision; None if in nothing.

    Numbers are compared with those beside them as the scale. Labels with scores must have the same first label, unless
    its lead is within the tolerance; labels at the end of a ranking may change places within it.

    Args:
        expected: What eager PyTorch answers.
        answer: What the candidate answers.
        precision: The candidate's.
    """
    if expected.status != answer.status:
        return f"status {answer.status} instead of {expected.status}: {answer.body[:200].decode(errors='replace')}"
    tolerance = TOLERANCES.get(precision, TOLERANCES["f32"])
    try:
        before, after = _content(expected), _content(answer)
    except (ValueError, OSError) as error:
        return f"an answer that cannot be read: {error}"
    return _compare(before, after, tolerance, "answer")


def _content(answer: ModelAnswer) -> Any:
    if answer.body.startswith(_ARRAYS):
        return np.load(io.BytesIO(answer.body), allow_pickle=False)
    if answer.content_type.startswith("image/"):
        return _Picture.of(answer.body)
    if answer.content_type.startswith("text/event-stream"):
        return _streamed_text(answer.body)
    try:
        return json.loads(answer.body)
    except ValueError:
        return answer.body


@dataclass(frozen=True)
class _Picture:
    """The pixels of a picture, uint8 or uint16 ``[height, width]`` or uint8 ``[height, width, channels]``."""

    pixels: np.ndarray

    @staticmethod
    def of(body: bytes) -> "_Picture":
        picture = Image.open(io.BytesIO(body), formats=("PNG", "JPEG", "WEBP"))
        pixels = np.asarray(picture)
        # Pillow has 16 bits in int32.
        return _Picture(pixels.astype(np.uint16) if picture.mode.startswith("I") else pixels)


def _opened(key: str, before: Any, after: Any) -> tuple[Any, Any]:
    """Returns two values of a key as numbers, where they are such as base64: pictures, and OpenAI's vectors."""
    if not (isinstance(before, str) and isinstance(after, str)):
        return before, after
    try:
        if before.startswith(_PNG) and after.startswith(_PNG):
            return _Picture.of(base64.b64decode(before)), _Picture.of(base64.b64decode(after))
        if key == "embedding":
            return np.frombuffer(base64.b64decode(before), "<f4"), np.frombuffer(base64.b64decode(after), "<f4")
    except (ValueError, OSError):
        # Equal texts are equal.
        pass
    return before, after


def _streamed_text(body: bytes) -> str:
    """Returns the text of a stream of events: how it is cut into pieces depends on the time."""
    events = [line.removeprefix(b"data:").strip() for line in body.splitlines() if line.startswith(b"data:")]
    pieces = [json.loads(event) for event in events if event != b"[DONE]"]
    choices = [choice for piece in pieces if isinstance(piece, dict) for choice in piece.get("choices") or [piece]]
    return "".join(
        str(mapping(choice.get("delta")).get("content") or choice.get("text") or choice.get("error") or "")
        for choice in choices
    )


def _compare(before: Any, after: Any, tolerance: float, path: str) -> str | None:
    if isinstance(before, _Picture):
        if not isinstance(after, _Picture):
            return f"{path} is no picture"
        return _compare_pictures(before.pixels, after.pixels, tolerance, path)
    if isinstance(before, np.ndarray) or _is_numbers(before):
        return _compare_numbers(before, after, tolerance, path)
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        if before and _are_scores(before) and _are_scores(after):
            return _compare_scores(before, after, tolerance, path)
        if before.keys() != after.keys():
            return f"{path} has the keys {sorted(after)[:8]} instead of {sorted(before)[:8]}"
        parts = (
            (f"{path}.{key}", *_opened(key, before[key], after[key])) for key in before if key not in _OF_ONE_ANSWER
        )
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            return f"{path} has {len(after)} entries instead of {len(before)}"
        parts = ((f"{path}[{index}]", *pair) for index, pair in enumerate(zip(before, after, strict=True)))
    elif _is_number(before) and not (isinstance(before, int) and isinstance(after, int)):
        return _compare_numbers([before], [after], tolerance, path)
    else:
        return None if before == after else f"{path} is {str(after)[:80]!r} instead of {str(before)[:80]!r}"
    return next((flaw for name, a, b in parts if (flaw := _compare(a, b, tolerance, name))), None)


def _compare_numbers(before: Any, after: Any, tolerance: float, path: str) -> str | None:
    try:
        one, other = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    except (TypeError, ValueError):
        return f"{path} is {str(after)[:80]!r} instead of numbers"
    if one.shape != other.shape:
        return f"{path} has the shape {list(other.shape)} instead of {list(one.shape)}"
    if not one.size:
        return None
    known = np.isfinite(one)
    if not np.array_equal(one[~known], other[~known], equal_nan=True) or not np.isfinite(other[known]).all():
        return f"{path} has NaN or infinity where there was none, or the reverse"
    # A number by itself is a score.
    scale = max(1.0 if one.size == 1 else _LEAST_SCALE, float(np.abs(one[known]).max(initial=0.0)))
    worst = float(np.abs(one[known] - other[known]).max(initial=0.0))
    return f"{path} differs by {worst:.2g}, more than {tolerance * scale:.2g}" if worst > tolerance * scale else None


def _compare_pictures(before: np.ndarray, after: np.ndarray, tolerance: float, path: str) -> str | None:
    if before.shape != after.shape or before.dtype != after.dtype:
        return f"{path} is another kind of picture"
    off = np.abs(before.astype(np.int64) - after.astype(np.int64))
    if before.ndim == 2 and before.dtype == np.uint8:
        # These may be numbers of classes: few may be others, by whatever number.
        share = float((off > 0).mean()) if off.size else 0.0
        return f"{path} differs in {share:.2%} of its pixels" if share > tolerance else None
    # A value that is rounded may be the next one.
    most = max(1.0, tolerance * float(np.iinfo(before.dtype).max))
    worst = int(off.max(initial=0))
    return f"{path} differs by {worst} of {np.iinfo(before.dtype).max}" if worst > most else None


def _compare_scores(before: Mapping[str, float], after: Mapping[str, float], tolerance: float, path: str) -> str | None:
    first = max(before, key=lambda key: before[key])
    chosen = max(after, key=lambda key: after[key])
    scale = max(1.0, *map(abs, before.values()))
    lead = before[first] - before.get(chosen, -math.inf)
    if first != chosen and not lead <= tolerance * scale:
        return f"{path} names {chosen!r} first instead of {first!r}"
    for names, others in ((before, after), (after, before)):
        for name, score in names.items():
            # A label that a ranking cut off had at most the score of its last one.
            rival = others.get(name, min(others.values(), default=0.0))
            off = abs(score - rival) if name in others else score - rival
            if off > tolerance * scale:
                return f"{path}.{name} differs by {off:.2g}, more than {tolerance * scale:.2g}"
    return None


def _are_scores(values: Mapping[str, Any]) -> bool:
    """Whether these are numbers that may differ a little: not those that count or name something."""
    numbers = list(values.values())
    if values.keys() == _BOX:
        return all(map(_is_number, numbers))
    return bool(numbers) and all(isinstance(number, float) for number in numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_numbers(value: Any) -> bool:
    """Returns True for a nested list of floats; lists of integers (tokens, pixels) have to be equal."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        flat = value[0] if value else None
        if isinstance(flat, list):
            return all(_is_numbers(item) for item in value)
        return (
            bool(value) and all(_is_number(item) for item in value) and any(isinstance(item, float) for item in value)
        )
    return False
