"""JSON in requests: parsed, or measured where TorchServe has parsed it already, within limits."""

import json
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from operator import mul
from typing import Any

import numpy as np

from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError

# Brackets or quotes around a value.
_AROUND = 2
# A digit holds 3.3 bits.
_BITS_OF_A_DIGIT = 4
# Most lists for each value: of features [batch, channels, 1, 1] each has two, of a batch of one three.
_MOST_LISTS = 4


def parse_json(body: str | bytes | bytearray, what: str = "the body") -> Any:
    """Parses JSON.

    Args:
        body: The text; bytes are UTF-8.
        what: What it is, for messages.

    Raises:
        InvalidInputError: It is no JSON, is nested too deep, or holds a number with thousands of digits.
    """
    try:
        # For bytes, `json.loads` takes half of a surrogate pair, and guesses UTF-16.
        return json.loads(body if isinstance(body, str) else bytes(body).removeprefix(BOM_UTF8).decode())
    except RecursionError:
        raise InvalidInputError(
            f"{what} is JSON that is nested too deep; the most is {MOST_DIMENSIONS} levels"
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{what} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"{what} is not valid JSON: {error}") from error
    except ValueError:
        # Python converts no text of more than `sys.get_int_max_str_digits()` digits.
        raise InvalidInputError(f"{what} holds an integer with thousands of digits") from None


def check_json(value: Any, *, max_bytes: int, key: str) -> None:
    """Checks JSON that the server has parsed, whose text is not known any more.

    Its size is that of its shortest text, with each character as one byte. So what is sent in at most ``max_bytes`` is
    never refused.

    Args:
        value: Parsed JSON; also with bytes in place of texts.
        max_bytes: The largest text.
        key: The configuration key that sets it.

    Raises:
        PayloadTooLargeError: It is larger.
        InvalidInputError: It is nested too deep.
    """
    size, level = 0, [value]
    for _ in range(MOST_DIMENSIONS + 1):
        below: list[Any] = []
        for item in level:
            size += _size(item)
            if isinstance(item, Mapping):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            if size + len(below) > max_bytes:
                raise PayloadTooLargeError(f"the request has more than {key} {max_bytes} bytes of JSON")
        if not below:
            return
        level = below
    raise InvalidInputError(f"the body is JSON that is nested too deep; the most is {MOST_DIMENSIONS} levels")


def _size(value: Any) -> int:
    """Returns the least number of bytes of a value's JSON, without what is in it."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value) + _AROUND
    if isinstance(value, Mapping):
        # Each key has quotes and a colon.
        return _AROUND + max(0, len(value) - 1) + sum(len(key) + 3 for key in value)
    if isinstance(value, list):
        return _AROUND + max(0, len(value) - 1)
    return max(1, value.bit_length() // _BITS_OF_A_DIGIT) if isinstance(value, int) else 1


# --- nested lists of JSON as arrays: their shape is checked, and what they take is bounded, before NumPy sees them
# NumPy makes of `["a", "long text"]` an array in which each element has the room of the longest: one text of 3 MB
# beside a million short ones would take terabytes. So it only gets numbers.


# As many dimensions as NumPy and torch have; also the deepest JSON that tasks read.
MOST_DIMENSIONS = 64
_LARGEST = 2**63 - 1
_ITEM_BYTES = 8


class NotRectangularError(ValueError):
    """Lists of different lengths, or lists beside single values."""


def flatten(value: Any) -> tuple[list[int], list[Any]]:
    """Returns the shape of nested lists, and their values in order; of a single value, an empty shape.

    Raises:
        NotRectangularError: They are not rectangular, or nested deeper than `MOST_DIMENSIONS`.
    """
    shape: list[int] = []
    values: list[Any] = [value]
    while values and isinstance(values[0], list):
        if len(shape) == MOST_DIMENSIONS:
            raise NotRectangularError(f"lists are nested deeper than {MOST_DIMENSIONS} levels")
        if not all(issubclass(kind, list) for kind in set(map(type, values))):
            raise NotRectangularError(f"level {len(shape)} holds lists and single values")
        lengths = set(map(len, values))
        if len(lengths) > 1:
            raise NotRectangularError(f"level {len(shape) + 1} has {min(lengths)} to {max(lengths)} values in a list")
        shape += lengths
        values = list(chain.from_iterable(values))
    if any(issubclass(kind, list) for kind in set(map(type, values))):
        raise NotRectangularError(f"level {len(shape)} holds lists and single values")
    return shape, values


def array_of(value: Any, what: str, *, max_bytes: int, key: str, item_bytes: int = _ITEM_BYTES) -> np.ndarray:
    """Converts nested lists of numbers.

    Args:
        value: The lists, or a single number.
        what: What they are, for messages.
        max_bytes: The largest array.
        key: The configuration key that sets it.
        item_bytes: Bytes of a number in the type that the array will be converted to.

    Returns:
        bool if all values are, otherwise int64 or uint64 if all are integers, otherwise float64.

    Raises:
        PayloadTooLargeError: The array would have more than ``max_bytes``.
        InvalidInputError: The lists are not rectangular, or hold something else than numbers of 64 bits.
    """
    try:
        shape, values = flatten(value)
    except NotRectangularError as error:
        raise InvalidInputError(f"{what} is not rectangular: {error}") from None
    size = len(values) * max(item_bytes, _ITEM_BYTES)
    if size > max_bytes:
        raise PayloadTooLargeError(f"{what} has {len(values)} numbers, {size} bytes, more than {key} {max_bytes}")
    kinds = set(map(type, values))
    if odd := next((kind for kind in kinds if kind not in {bool, int, float}), None):
        raise InvalidInputError(f"{what} must be nested lists of numbers of equal length, not {_described(odd)}")
    try:
        return _converted(values, kinds).reshape(shape)
    except OverflowError:
        raise InvalidInputError(f"{what} has a number that does not fit into 64 bits") from None


def _converted(values: list[Any], kinds: set[type]) -> np.ndarray:
    if not values or float in kinds:
        return np.array(values, dtype=np.float64)
    if kinds == {bool}:
        return np.array(values, dtype=np.bool_)
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        if min(values) < 0:
            raise
        return np.array(values, dtype=np.uint64)


def _described(kind: type) -> str:
    names = {str: "text", dict: "objects", type(None): "null"}
    return names.get(kind, kind.__name__)


def shape_of(value: Any, count: int, what: str, *, infers: bool = False) -> list[int]:
    """Checks the shape that a request states for its values.

    Args:
        value: The shape.
        count: The number of values.
        what: What has this shape, for messages.
        infers: Whether one dimension may be -1, which stands for what the others leave.

    Raises:
        InvalidInputError: It is no list of integers, or needs another number of values.
    """
    least = -1 if infers else 0
    if not isinstance(value, list) or not all(type(item) is int and least <= item <= _LARGEST for item in value):
        raise InvalidInputError(f"{what}: shape must be a list of integers from {least} to 2^63 - 1")
    # Before they are multiplied, which takes long for many.
    if len(value) > MOST_DIMENSIONS:
        raise InvalidInputError(f"{what}: shape has {len(value)} dimensions; the most is {MOST_DIMENSIONS}")
    rest = _product(item for item in value if item != -1)
    if value.count(-1) == 1 and rest and count % rest == 0:
        return [count // rest if item == -1 else item for item in value]
    if -1 in value or rest != count:
        raise InvalidInputError(f"{what}: shape {value} needs {rest} values, but data has {count}")
    return list(value)


def _product(sizes: Any) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def nested(values: Sequence[Any], shape: Sequence[int]) -> Any:
    """Returns values as nested lists of a shape that has as many; an empty list if there are none.

    Raises:
        InvalidInputError: It has too many lists for its values.
    """
    if not shape:
        return values[0]
    if not values:
        # A shape of no values can ask for any number of empty lists.
        return []
    # A dimension of 1 at the end takes a list for each value, and so does each further one.
    if (lists := sum(accumulate(shape[:-1], mul))) > (most := _MOST_LISTS * len(values) + MOST_DIMENSIONS):
        raise InvalidInputError(f"{len(values)} values of shape {list(shape)} are {lists} lists; the most is {most}")
    level = list(values)
    for size in reversed(shape[1:]):
        level = [level[at : at + size] for at in range(0, len(level), size)]
    return level
