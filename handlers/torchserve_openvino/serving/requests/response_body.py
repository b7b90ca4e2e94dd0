"""What a host can send: text that is UTF-8, JSON that is valid, and no more bytes than its frontend takes."""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from torchserve_openvino.errors import ModelCallError, PayloadTooLargeError

# By how much indentation lengthens JSON at most: a comma and a blank become a comma, a new line and two blanks for
# each level. Tasks nest answers less deep than this.
_INDENTED = 32
_STRICT = json.JSONEncoder(allow_nan=False)


def sendable(body: Any, most_bytes: int | None) -> Any:
    """Returns a body as it can be sent; NaN and infinity become null, as JSON has neither.

    TorchServe turns bodies into bytes after the handler has returned, all in one message. There, one body that is not
    valid would fail the batch, or end the worker.

    Args:
        body: Bytes, text, a tensor, or JSON data.
        most_bytes: The most that the host sends as one body; None if it has no limit.

    Raises:
        PayloadTooLargeError: It has more bytes.
        ModelCallError: It is no JSON.
    """
    if isinstance(body, (bytes, bytearray)):
        check_length(len(body), most_bytes)
        return body
    if isinstance(body, torch.Tensor):
        check_length(body.nbytes, most_bytes)
        return body
    if isinstance(body, str):
        raw = body.encode("utf-8", "replace")
        check_length(len(raw), most_bytes)
        return raw.decode()
    body, length = _as_json(body)
    if most_bytes is not None and length > most_bytes // _INDENTED:
        check_length(len(json.dumps(body, indent=2)), most_bytes)
    return body


def check_length(length: int, most_bytes: int | None) -> None:
    """Checks the length of an answer.

    Raises:
        PayloadTooLargeError: It is longer than what the host sends.
    """
    if most_bytes is not None and length > most_bytes:
        raise PayloadTooLargeError(
            f"the answer has {length} bytes or more; TorchServe's max_response_size is {most_bytes}. Ask for less, "
            "send fewer inputs in one request, or raise max_response_size in config.properties"
        )


def _as_json(body: Any) -> tuple[Any, int]:
    """Returns JSON data without NaN and infinity, and the length of its text without indentation."""
    try:
        try:
            return body, len(_STRICT.encode(body))
        except ValueError:
            body = finite(body)
            return body, len(_STRICT.encode(body))
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelCallError(f"the handler's answer cannot be sent as JSON: {error}") from error


def finite(value: Any) -> Any:
    """Returns JSON data with null in place of NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {finite(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value
