"""A handler's context on other hosts than TorchServe, with the members of TorchServe's that handlers use."""

import copy
import logging
import re
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from torchserve_openvino.errors import ItemError, ModelCallError
from torchserve_openvino.serving.requests.messages import Request, Response
from torchserve_openvino.serving.requests.refusals import is_status

logger = logging.getLogger(__name__)

_NAME, _VALUE = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"), re.compile(r"[\t -~\x80-\xff]*")
# RFC 9110 and 9112: of the connection, or of how the body is sent.
_OF_THE_HOST = frozenset({
    "connection", "content-length", "date", "keep-alive", "proxy-authenticate", "proxy-connection", "server", "te",
    "trailer", "transfer-encoding", "upgrade", "x-request-id",
})  # fmt: skip
# By it TorchServe's worker lets the frontend wait for a further piece.
_STREAM_NEXT = "ts_stream_next"


@dataclass
class Headers:
    """The headers of one request, and the status and headers of its answer; TorchServe's ``RequestProcessor``.

    ``has_begun`` is whether a call has sent a piece of the answer: no further call may answer this request.
    """

    given: Mapping[str, str]
    status: int = HTTPStatus.OK
    phrase: str = ""
    answer: dict[str, str] = field(default_factory=dict)
    has_begun: bool = False

    def get_request_property(self, key: str) -> str | None:
        """Returns a header of the request: under its name as it came, or in lower case, as web servers make it."""
        value = self.given.get(key)
        return value if value is not None else self.given.get(key.lower())

    def get_request_properties(self) -> dict[str, str]:
        """Returns all headers of the request."""
        return dict(self.given)

    def report_status(self, code: int, reason_phrase: str = "") -> None:
        """Sets the answer's status."""
        self.status, self.phrase = code, reason_phrase

    def get_response_status_code(self) -> int:
        """Returns the answer's status."""
        return self.status

    def get_response_status_phrase(self) -> str:
        """Returns the words beside the answer's status."""
        return self.phrase

    def add_response_property(self, key: str, value: str) -> None:
        """Sets a header of the answer."""
        self.answer[key] = value

    def get_response_headers(self) -> dict[str, str]:
        """Returns the headers of the answer."""
        return self.answer

    def get_response_header(self, key: str) -> str | None:
        """Returns a header of the answer."""
        return self.answer.get(key)


class PieceSocket:
    """Takes the place of the worker's connection to TorchServe's frontend, to which handlers send pieces of answers.

    `ts.handler_utils.utils.send_intermediate_predict_response` writes a message of TorchServe's protocol
    (`ts.protocol.otf_message_handler.create_predict_response`); the pieces in it go to the requests.

    Args:
        requests: The requests of the call, by the ids that the handler knows.
    """

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests

    def sendall(self, message: bytes) -> None:
        """Sends each piece of a message to its request."""
        data = _Fields(bytes(message))
        # Status and text of the whole message.
        data.number(), data.text()
        while (size := data.number()) >= 0:
            name = data.take(size).decode()
            content_type, status, _ = data.text(), data.number(), data.text()
            headers = {data.text(): data.text() for _ in range(data.number())}
            body = data.take(data.number())
            if (request := self._requests.get(name)) is not None:
                # The headers of a response go out with its first piece.
                kind, headers = ("", {}) if request.has_begun else _sendable(headers)
                request.send(Response(body, content_type or kind or _piece_type(body), status, headers=headers))


def _piece_type(body: bytes) -> str:
    """Returns the type of a piece for which the handler sets none: text, where it is text, as handlers send tokens."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return "application/octet-stream"
    return "text/plain; charset=utf-8"


class _Fields:
    """Reads the fields of a message: integers of four bytes, and texts behind their lengths."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        begin, self._at = self._at, self._at + size
        return self._data[begin : self._at]

    def number(self) -> int:
        (value,) = struct.unpack("!i", self.take(4))
        return int(value)

    def text(self) -> str:
        return self.take(self.number()).decode()


class Context:
    """What a handler knows of the model, and of the requests of one call.

    Args:
        manifest: The archive's.
        model_dir: Where the archive was unpacked.
        config: The archive's YAML.
        batch_size: Most requests in a call.
        metrics: Takes metrics, as TorchServe's cache does.

    Attributes:
        workers: Workers of the model on this machine; None if the host does not know.
        keeps_idle: Whether a worker that nobody needs stays, or starts again as soon as it ends.
        requests: The requests of the call.
    """

    workers: int | None = None
    keeps_idle: bool = True

    def __init__(
        self, manifest: dict[str, Any], model_dir: str, config: dict[str, Any], batch_size: int, metrics: Any
    ) -> None:
        self.manifest = manifest
        self.model_name: str = manifest.get("model", {}).get("modelName", "model")
        self.model_yaml_config = config
        self.metrics = metrics
        self.system_properties: dict[str, Any] = {
            "model_dir": model_dir, "gpu_id": None, "batch_size": batch_size, "limit_max_image_pixels": True,
        }  # fmt: skip
        self.request_ids: dict[int, str] | None = None
        self.request_processor: list[Headers] | None = None
        self.stopping_criteria: Any = None
        self.cl_socket: PieceSocket | None = None
        self.requests: Sequence[Request] = ()

    def for_requests(self, requests: Sequence[Request]) -> "Context":
        """Returns the context of one call with these requests."""
        context = Context.__new__(Context)
        context.__dict__.update(self.__dict__)
        by_id: dict[str, Request] = {}
        for index, request in enumerate(requests):
            # Clients may give several requests one id, by which handlers tell them apart.
            by_id[request.id if request.id not in by_id else f"{request.id}-{index}-{uuid.uuid4().hex}"] = request
        context.request_ids = dict(enumerate(by_id))
        # As TorchServe's REST API sets it: each request can have a status of its own.
        context.request_processor = [Headers({"explain": "False", **request.headers}) for request in requests]
        context.stopping_criteria = None
        context.cl_socket = PieceSocket(by_id)
        context.requests = requests
        return context

    def _of(self, index: int) -> Headers:
        assert self.request_processor is not None, "outside of a call there are no requests"
        return self.request_processor[index]

    def get_request_id(self, idx: int = 0) -> str | None:
        """Returns a request's id."""
        return (self.request_ids or {}).get(idx)

    def get_request_header(self, idx: int, key: str) -> str | None:
        """Returns a header of a request; None before the first request."""
        return self._of(idx).get_request_property(key) if self.request_processor else None

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        """Returns all headers of a request."""
        return self._of(idx).get_request_properties()

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Sets the type of an answer."""
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        """Returns the type of an answer; None if it is not set."""
        return self._of(idx).get_response_header("content-type")

    def get_response_status(self, idx: int) -> tuple[int, str]:
        """Returns the status of an answer, in numbers and in words."""
        headers = self._of(idx)
        return headers.status, headers.phrase

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Sets the status of an answer."""
        self._of(idx).report_status(code, phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        """Sets the status of all answers."""
        for headers in self.request_processor or ():
            headers.report_status(code, phrase)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        """Returns the headers of an answer."""
        return self._of(idx).get_response_headers()

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Sets a header of an answer."""
        self._of(idx).add_response_property(key, value)


def context_of(context: Any, requests: Sequence[Request]) -> Any:
    """Returns the context with which a user's handler answers requests: TorchServe's own, elsewhere a new one.

    Args:
        context: The handler's.
        requests: The requests of its items.
    """
    return context.for_requests(requests) if isinstance(context, Context) else context


def positions_in(context: Any, requests: Sequence[Request], call: Sequence[Request]) -> tuple[list[int], int]:
    """Returns which of a context's requests each item belongs to, and how many of them there are.

    A context of ours has a request for each item. TorchServe's has those of the call, of which an envelope may have
    several items, or none.

    Args:
        context: What `context_of` returned.
        requests: The request of each item.
        call: The requests of the call.
    """
    if isinstance(context, Context):
        return list(range(len(requests))), len(requests)
    order = {id(request): position for position, request in enumerate(call)}
    return [order[id(request)] for request in requests], len(call)


def with_own_headers(answers: Sequence[Any], context: Any) -> list[Any]:
    """Returns the answers of a user's handler with the statuses and types that it set in its context."""
    if not isinstance(context, Context):
        # TorchServe reads them there.
        return list(answers)
    return [
        answer if isinstance(answer, ItemError) else _with_headers(answer, context, index)
        for index, answer in enumerate(answers)
    ]


def _with_headers(answer: Any, context: Context, index: int) -> Response | ItemError:
    status = context.get_response_status(index)[0]
    if not is_status(status):
        logger.error("A handler has set %r as the status of a response", status)
        return ModelCallError(f"the handler has set {status!r} as the status of the response")
    content_type, headers = _sendable(context.get_response_headers(index))
    return Response(answer, content_type, status, headers=headers)


def _sendable(values: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Returns the type among the headers that a handler has set, and those of the others that are sent."""
    headers = {str(name): str(value) for name, value in values.items() if name != _STREAM_NEXT}
    for name in [name for name in headers if not _may_be_set(name, headers[name])]:
        logger.warning("the header %r of a response is not sent: a handler cannot set it", name)
        del headers[name]
    content_type = next((headers.pop(name) for name in list(headers) if name.lower() == "content-type"), "")
    return content_type, headers


def _may_be_set(name: str, value: str) -> bool:
    """Returns True for a header that HTTP allows, and that does not concern the connection or the body's length."""
    valid = _NAME.fullmatch(name) is not None and _VALUE.fullmatch(value) is not None
    return valid and name.lower() not in _OF_THE_HOST


@contextmanager
def only(context: Any, positions: Sequence[int], count: int) -> Iterator[None]:
    """Restricts the context that a handler sees to some requests of a batch, numbered from 0.

    Args:
        context: TorchServe's context.
        positions: Position in the batch of the request of each item that the handler gets.
        count: How many requests the batch has.

    Raises:
        ModelCallError: A piece of a response was sent in an earlier call, and would be sent again.
    """
    processors, ids = getattr(context, "request_processor", None), getattr(context, "request_ids", None)
    if not isinstance(processors, list) or len(processors) != count:
        yield
        return
    seen = [processors[position] for position in positions]
    if any(isinstance(processor, Headers) and processor.has_begun for processor in seen):
        raise ModelCallError("its call failed after a piece of the response was sent")
    # Statuses and headers that a failed call has set are not those of the calls that are made instead.
    before = [{name: copy.copy(value) for name, value in vars(processor).items()} for processor in seen]
    if list(positions) != list(range(count)):
        context.request_processor = seen
        context.request_ids = {number: (ids or {}).get(position) for number, position in enumerate(positions)}
    try:
        yield
    except BaseException:
        for processor, state in zip(seen, before, strict=True):
            vars(processor).clear()
            vars(processor).update(state)
        raise
    finally:
        context.request_processor, context.request_ids = processors, ids
        for position in set(positions) if isinstance(context, Context) else ():
            processors[position].has_begun = context.requests[position].has_begun
