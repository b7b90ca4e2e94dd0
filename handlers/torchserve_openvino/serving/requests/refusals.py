"""Bodies of refusals. Nothing here needs torch, so that a server without it can refuse, too."""

from collections.abc import Callable
from typing import Any

from torchserve_openvino.errors import ItemError

# Makes the body of a refusal, as a client reads it.
RefusalForm = Callable[[ItemError], dict[str, Any]]

# Characters of the message in a refusal.
_LONGEST_MESSAGE = 2000


# Of a final response; those below 200 announce another one.
_STATUSES = range(200, 600)


def is_status(value: Any) -> bool:
    """Returns True for a number that a response can have as its status."""
    return isinstance(value, int) and value in _STATUSES


def refusal(error: ItemError, form: RefusalForm | None = None) -> dict[str, Any]:
    """Returns the body that the sender of a refused item gets.

    Args:
        error: Why it is refused.
        form: Makes the body, if the error has no form of its own; None for this package's own form.
    """
    return (error.form or form or plain_refusal)(error)


def plain_refusal(error: ItemError) -> dict[str, Any]:
    """Returns the body of a refusal in this package's own form."""
    return {"code": error.status, "type": type(error).__name__, "message": shortened(str(error))}


def with_error(error: ItemError) -> dict[str, Any]:
    """Returns the body of a refusal with the field in which clients of KServe's version 2 look for the message."""
    body = plain_refusal(error)
    return {"error": body["message"], **body}


def with_request_id(body: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the body of a refusal with the request's id, if it has one."""
    return {**body, "request_id": name} if name else body


def shortened(message: str) -> str:
    """Returns a message without its middle if it is too long, as one that repeats a value of the request can be."""
    half = _LONGEST_MESSAGE // 2
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:half]} ... {message[-half:]}"
