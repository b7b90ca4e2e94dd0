"""`Request` and `Response`: what hosts and their models exchange. It needs neither torch nor a server."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal

from torchserve_openvino.errors import ItemError
from torchserve_openvino.serving.host.context import encoded
from torchserve_openvino.serving.requests.refusals import refusal, with_request_id

Kind = Literal["json", "kserve", "kservev2"]


def unhealthy_reason(body: bytes) -> str:
    """Returns what a worker says against its health in its response to a probe; empty if it is healthy."""
    try:
        state = json.loads(body)
        return "" if state.get("healthy") else str(state.get("reason") or state.get("message") or state)
    except (ValueError, AttributeError):
        return f"its handler does not answer for its health: {body[:100]!r}"


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        row: Its parts by name, as TorchServe passes them to a handler: ``{"body": ...}``.
        headers: Its headers.
        id: Its id.
        envelope: The protocol of its body, by TorchServe's name; None for the handler's own.
        arrived: When it came, in seconds since 1970; 0 if that is not known.
    """

    row: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    id: str = ""
    envelope: Kind | None = None
    arrived: float = 0.0


@dataclass(frozen=True)
class Response:
    """The response to one request, or a piece of it."""

    body: bytes
    content_type: str
    status: int = HTTPStatus.OK

    @staticmethod
    def refused(error: ItemError, name: str = "") -> "Response":
        """Returns the response to a refused request.

        Args:
            error: Why it is refused.
            name: The request's id.
        """
        body, content_type = encoded(with_request_id(refusal(error), name))
        return Response(body, content_type, error.status)


def unavailable(reason: str, name: str = "") -> Response:
    """Returns the response (503) to a request that may succeed later."""
    error = ItemError(f"{reason}: send the request again later")
    error.status = HTTPStatus.SERVICE_UNAVAILABLE.value
    return Response.refused(error, name)
