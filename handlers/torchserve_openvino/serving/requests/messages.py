"""`Request` and `Response`: what hosts and services exchange. It needs neither torch nor a server."""

import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from http import HTTPStatus
from typing import Any, Literal

from torchserve_openvino.errors import ItemError
from torchserve_openvino.serving.requests.refusals import RefusalForm, is_status, refusal, with_request_id

EnvelopeKind = Literal["json", "kserve", "kservev2"]

# Of a request that no handler sees: the worker answers it by its own health.
HEALTH_HEADER = "openvino-health"
# TorchServe's HTTP API adds it to each request; gRPC and workflows do not.
EXPLAIN_HEADER = "explain"
# What follows model and version in a request's URL.
PATH_HEADER = "url_path"
# Requests that join each other in one worker's engine; the engine refuses more before that (generate.max_waiting).
MOST_JOINING = 512
_ID = re.compile(r"[!-~]{1,128}")
JSON = "application/json"
EVENT_STREAM = "text/event-stream"


def _dropped(piece: "Response") -> None:
    """Outside of a server nobody waits for pieces."""


class _Sender:
    """Sends pieces of a response, and notes that one went out; copies of a request share it."""

    def __init__(self, send: Callable[["Response"], None]) -> None:
        self._send = send
        self.has_sent = False

    def __call__(self, piece: "Response") -> None:
        self._send(piece)
        self.has_sent = True


def _stays() -> bool:
    """Returns False: a host that does not see clients hang up answers all."""
    return False


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        row: Its parts by name, as TorchServe passes them to a handler: ``{"body": ...}``.
        headers: Its headers.
        id: Its id.
        envelope: The protocol of its body, by TorchServe's name; None for the handler's own.
        arrived: When it came, in seconds since 1970; 0 if that is not known.
        has_own_status: Whether its response can have a status of its own and pieces; TorchServe has neither over gRPC
            and in workflows.
        send: Sends a piece of the response, before the call ends.
        is_gone: Returns True if the client has hung up.
    """

    row: Any
    headers: Mapping[str, str] = field(default_factory=dict)
    id: str = ""
    envelope: EnvelopeKind | None = None
    arrived: float = 0.0
    has_own_status: bool = True
    send: Callable[["Response"], None] = _dropped
    is_gone: Callable[[], bool] = _stays

    def __post_init__(self) -> None:
        """Lets `send` note that a piece went out."""
        if not isinstance(self.send, _Sender):
            object.__setattr__(self, "send", _Sender(self.send))

    @property
    def has_begun(self) -> bool:
        """Whether a piece of its response was sent."""
        return isinstance(self.send, _Sender) and self.send.has_sent

    def header(self, name: str) -> str | None:
        """Returns a header; None where there is none of this name.

        Hosts pass names as they came, and clients and proxies write them in upper, lower or mixed case.

        Args:
            name: The header's name, in any case.
        """
        if (value := self.headers.get(name)) is not None:
            return str(value)
        value = self._lower_headers.get(name.lower())
        return None if value is None else str(value)

    @cached_property
    def _lower_headers(self) -> dict[str, Any]:
        # Of two that differ in case alone, the first one counts.
        return {str(key).lower(): value for key, value in reversed(list(self.headers.items()))}

    @property
    def explains(self) -> bool:
        """Whether it was sent to /explanations/."""
        return self.header(EXPLAIN_HEADER) == "True"

    @property
    def path(self) -> str:
        """What follows model and version in its URL, without slashes around it; empty for nothing."""
        return (self.header(PATH_HEADER) or "").strip("/")

    def without_path(self) -> "Request":
        """Returns the request as if it were sent to the model itself."""
        return replace(self, headers={key: value for key, value in self.headers.items() if key.lower() != PATH_HEADER})

    @property
    def asks_health(self) -> bool:
        """Whether it asks for the worker's health."""
        return self.header(HEALTH_HEADER) is not None


@dataclass(frozen=True)
class Response:
    """The response to one request, or a piece of it.

    Attributes:
        body: Bytes, text, a tensor or JSON data.
        content_type: Its type; empty for that of `encoded`.
        status: The HTTP status.
        error: Why the request is refused; None if it is answered.
        headers: Further headers, which the handler has set.
    """

    body: Any
    content_type: str = ""
    status: int = HTTPStatus.OK
    error: ItemError | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def refused(error: ItemError, name: str = "", form: RefusalForm | None = None) -> "Response":
        """Returns the response to a refused request, in bytes.

        Args:
            error: Why it is refused.
            name: The request's id.
            form: Makes the body, if the error has no form of its own; None for this package's own form.
        """
        return Response(with_request_id(refusal(error, form), name), JSON, error.status, error).encoded()

    def encoded(self) -> "Response":
        """Returns the response with its body in bytes, and with a type.

        Raises:
            TypeError: The body is neither bytes, text nor JSON.
            ValueError: The status is none of a response.
        """
        if not is_status(self.status):
            raise ValueError(f"a response cannot have the status {self.status!r}")
        body, content_type = encoded(self.body)
        return replace(self, body=body, content_type=self.content_type or content_type)


def encoded(body: Any) -> tuple[bytes, str]:
    """Returns what is sent for a body, and its type where none is set; as TorchServe encodes it.

    Raises:
        TypeError: The body is neither bytes, text nor JSON.
    """
    if isinstance(body, (bytes, bytearray)):
        return bytes(body), "application/octet-stream"
    if isinstance(body, str):
        return body.encode(), "text/plain; charset=utf-8"
    return json.dumps(body, indent=2).encode(), JSON


def request_id(claimed: str | None) -> str:
    """Returns a request's id: the one that its client claims, if it is fit for a line of a log, else a new one."""
    return claimed if claimed and _ID.fullmatch(claimed) else uuid.uuid4().hex


def unavailable(reason: str, name: str = "", form: RefusalForm | None = None) -> Response:
    """Returns the response (503) to a request that may succeed later.

    Args:
        reason: Why it can't be answered now.
        name: The request's id.
        form: Makes the body, as the client reads it; None for this package's own form.
    """
    return Response.refused(unavailable_error(reason), name, form)


def unavailable_error(reason: str) -> ItemError:
    """Returns the refusal (503) of a request that may succeed later."""
    error = ItemError(f"{reason}: send the request again later")
    error.status = HTTPStatus.SERVICE_UNAVAILABLE.value
    return error


def unhealthy_reason(body: bytes) -> str:
    """Returns what a worker says against its health in its response to a probe; empty if it is healthy."""
    try:
        state = json.loads(body)
        return "" if state.get("healthy") else str(state.get("reason") or state.get("message") or state)
    except (ValueError, AttributeError):
        return f"its handler does not answer for its health: {body[:100]!r}"
