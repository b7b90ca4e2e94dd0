"""Headers of requests: `request_header` finds one however the client spells its name."""

from collections.abc import Mapping
from typing import Any

# Of a request that no handler sees: the worker answers it by its own health.
HEALTH_HEADER = "openvino-health"


def request_header(context: Any, index: int, name: str) -> str | None:
    """Returns a header of a request; None where it has none of this name, or where there is no request.

    TorchServe passes names as they came, and clients and proxies write them in upper, lower or mixed case.

    Args:
        context: The call's context.
        index: The request's place in the call.
        name: The header's name, in any case.
    """
    if getattr(context, "request_processor", None) is None:
        return None
    headers = context.get_all_request_header(index)
    # A user's test may have a context that has anything under each name.
    if not isinstance(headers, Mapping):
        return None
    lower = name.lower()
    return next((str(value) for key, value in headers.items() if str(key).lower() == lower), None)
