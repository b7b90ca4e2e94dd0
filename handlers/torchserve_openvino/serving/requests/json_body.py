"""JSON in requests: parsed, or measured where TorchServe has parsed it already, within limits."""

import json
from collections.abc import Mapping
from typing import Any

from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError
from torchserve_openvino.serving.requests.nested_lists import MOST_DIMENSIONS

# Brackets or quotes around a value.
_AROUND = 2
# A digit holds 3.3 bits.
_BITS_OF_A_DIGIT = 4


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
        return json.loads(body if isinstance(body, str) else bytes(body).decode("utf-8-sig"))
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
        for each in level:
            size += _size(each)
            if isinstance(each, Mapping):
                below.extend(each.values())
            elif isinstance(each, list):
                below.extend(each)
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
