"""Turns answers and refusals into what TorchServe sends: bodies, statuses and content types."""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from torchserve_openvino.errors import ItemError, PayloadTooLargeError
from torchserve_openvino.serving.host.frontend_limits import most_response_bytes
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.requests.envelopes import Envelope, Request, status_of
from torchserve_openvino.serving.requests.isolation import isolated
from torchserve_openvino.serving.requests.refusals import refusal, shortened, with_request_id
from torchserve_openvino.serving.requests.response_body import check_length, finite, sendable

logger = logging.getLogger(__name__)

# A header that TorchServe's HTTP inference API adds to each request; gRPC and workflows do not.
_OVER_HTTP = "explain"

AnswerItems = Callable[[list[Any], Sequence[int]], list[Any]]


class AnswerList(list[Any]):
    """The answers to one request with a list of inputs; each may be an `ItemError`."""


class SelfWritten(ABC):
    """An answer that writes itself as JSON, faster than TorchServe would.

    Attributes:
        refusal_form: Makes the body of the refusal that is sent instead, if the answer is too long; see `ItemError`.
    """

    refusal_form: Callable[[Any], dict[str, Any]] | None = None

    @abstractmethod
    def least_bytes(self) -> int:
        """Returns a number of bytes that it has at least, found without writing it."""

    @abstractmethod
    def plain(self) -> Any:
        """Returns the answer as plain JSON data, for envelopes."""

    @abstractmethod
    def written(self) -> bytes:
        """Returns the answer as JSON."""


def identified(body: dict[str, Any], error: ItemError, context: Any, index: int) -> dict[str, Any]:
    """Returns the body of a refused request with the request's id, by which the log names a server error.

    Args:
        body: The refusal.
        error: What it was made of.
        context: The call's context.
        index: The request's place in the call.
    """
    name = context.get_request_id(index)
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("Request %s is answered with %d: %s", name, error.status, shortened(str(error)))
    return with_request_id(body, name)


def explains(context: Any, position: int) -> bool:
    """Whether a request was sent to /explanations/."""
    return bool(context.get_request_header(position, _OVER_HTTP) == "True")


def finish(answers: Sequence[Any], context: Any, counters: Counters) -> list[Any]:
    """Returns the bodies of plain requests, one item each; sets statuses and content types in the context.

    Raises:
        PredictionException: See `fail_where_statuses_are_lost`.
    """
    most_bytes = most_response_bytes(context)
    bodies = [
        answer if isinstance(answer, ItemError) else isolated(partial(_sendable, answer, most_bytes))
        for answer in answers
    ]
    failed = {index: body for index, body in enumerate(bodies) if isinstance(body, ItemError)}
    for index, error in failed.items():
        if isinstance(answer := answers[index], SelfWritten):
            error.form = answer.refusal_form
    _count_refusals([failed.get(index, answer) for index, answer in enumerate(answers)], counters)
    fail_where_statuses_are_lost(context, failed, len(answers))
    for index, (answer, body) in enumerate(zip(answers, bodies, strict=True)):
        if isinstance(body, ItemError):
            set_status(context, index, body.status)
            bodies[index] = identified(refusal(body), body, context, index)
            continue
        if isinstance(answer, AnswerList):
            set_status(context, index, status_of(answer))
        if isinstance(body, bytes) and not context.get_response_content_type(index):
            kind = "application/octet-stream" if body is answer else "application/json"
            context.set_response_content_type(index, kind)
    return bodies


def _count_refusals(answers: Sequence[Any], counters: Counters) -> None:
    for answer in answers:
        if isinstance(answer, ItemError):
            counters.add(f"refused_{answer.status}")
        elif isinstance(answer, AnswerList):
            _count_refusals(answer, counters)


def _each(answers: Sequence[Any]) -> list[Any]:
    """Returns the answers of a request, those to an item with several inputs one by one."""
    return [each for answer in answers for each in (answer if isinstance(answer, AnswerList) else [answer])]


def _sendable(answer: Any, most_bytes: int | None) -> Any:
    """Returns what is sent for the answer to a plain request.

    Raises:
        ItemError: It can't be sent.
    """
    parts = answer if isinstance(answer, AnswerList) else [answer]
    check_length(sum(each.least_bytes() for each in parts if isinstance(each, SelfWritten)), most_bytes)
    return sendable(_body(answer), most_bytes)


def _body(answer: Any) -> Any:
    """Returns the body of an answer; bytes if it, or one of several, writes itself."""
    if isinstance(answer, SelfWritten):
        return answer.written()
    if isinstance(answer, AnswerList) and any(isinstance(each, SelfWritten) for each in answer):
        return b"[%b]" % b",\n".join(map(_json, answer))
    return shown(answer)


def _json(answer: Any) -> bytes:
    return answer.written() if isinstance(answer, SelfWritten) else json.dumps(finite(shown(answer)), indent=2).encode()


def shown(answer: Any) -> Any:
    """Returns an answer or a refusal as plain data."""
    if isinstance(answer, ItemError):
        return refusal(answer)
    if isinstance(answer, SelfWritten):
        return answer.plain()
    return [shown(each) for each in answer] if isinstance(answer, AnswerList) else answer


def answer_enveloped(
    envelope: Envelope,
    data: Sequence[Any],
    context: Any,
    answer_items: AnswerItems,
    counters: Counters,
    most_items: int | None,
) -> list[Any]:
    """Returns the bodies of enveloped requests, each with any number of items.

    Args:
        answer_items: Maps the items of the batch, and the place of the request of each, to as many answers, each of
            which may be an `ItemError`.
        most_items: The most items in one request; None if the handler sets no limit.

    Raises:
        PredictionException: See `fail_where_statuses_are_lost`.
    """
    most_bytes = most_response_bytes(context)
    requests = [isolated(partial(_opened, envelope, row, most_items)) for row in data]
    opened = [(index, request) for index, request in enumerate(requests) if isinstance(request, Request)]
    good = [(index, item) for index, request in opened for item in request.items if not isinstance(item, ItemError)]
    answered = iter(answer_items([item for _, item in good], [index for index, _ in good]) if good else [])
    by_request: list[list[Any]] = [
        [request] if isinstance(request, ItemError)
        else [item if isinstance(item, ItemError) else next(answered) for item in request.items]
        for request in requests
    ]  # fmt: skip
    bodies: list[Any] = []
    failed = {}
    for index, (request, answers) in enumerate(zip(requests, by_request, strict=True)):
        refused = [answer for answer in _each(answers) if isinstance(answer, ItemError)]
        body: Any = request
        if isinstance(request, Request):
            body = isolated(partial(_closed, envelope, request, answers, context, index, most_bytes))
        if isinstance(body, ItemError):
            failed[index] = body
        elif len(refused) == len(_each(answers)):
            failed[index] = refused[0]
        _count_refusals([body] if isinstance(body, ItemError) else answers, counters)
        bodies.append(body)
    fail_where_statuses_are_lost(context, failed, len(requests))
    for index, body in enumerate(bodies):
        if isinstance(body, ItemError):
            set_status(context, index, body.status)
            bodies[index] = identified(refusal(body), body, context, index)
        else:
            set_status(context, index, status_of(_each(by_request[index])))
    return bodies


def _opened(envelope: Envelope, row: Any, most: int | None) -> Request:
    request = envelope.open(row)
    if most is not None and len(request.items) > most:
        raise PayloadTooLargeError(f"{len(request.items)} inputs in one request; the most is {most}: send several")
    return request


def _closed(
    envelope: Envelope, request: Request, answers: Sequence[Any], context: Any, index: int, most_bytes: int | None
) -> Any:
    """Returns the body that answers an enveloped request.

    Raises:
        ItemError: It can't be sent.
    """
    check_length(sum(each.least_bytes() for each in _each(answers) if isinstance(each, SelfWritten)), most_bytes)
    return sendable(envelope.close(request, list(map(shown, answers)), context, index), most_bytes)


def fail_where_statuses_are_lost(context: Any, failed: Mapping[int, ItemError], count: int) -> None:
    """Fails the whole batch if a refusal would be sent as a success.

    TorchServe supports a status for each request only over HTTP. It drops them over gRPC and between the nodes of a
    workflow: a refusal would count as an answer, and go on to the next node.

    Args:
        failed: Refused requests by their place in the batch.
        count: Requests in the batch.

    Raises:
        PredictionException: A refused request can't have its own status; TorchServe fails the whole batch with it.
    """
    lost = [index for index in failed if context.get_request_header(index, _OVER_HTTP) is None]
    if not lost:
        return
    from ts.utils.util import PredictionException

    error = failed[lost[0]]
    text = f"{type(error).__name__}: {error}"
    if len(failed) == count:
        raise PredictionException(text, error.status)
    raise PredictionException(
        f"another request of the same batch was refused ({text}); with gRPC and workflows, TorchServe has one status "
        "for the whole batch: send yours again, or set batchSize: 1",
        HTTPStatus.SERVICE_UNAVAILABLE.value,
    )


def set_status(context: Any, index: int, status: int) -> None:
    """Sets the HTTP status of a request; the body of one that is not 200 is JSON."""
    if status != HTTPStatus.OK:
        context.set_response_status(status, _phrase(status), index)
        context.set_response_content_type(index, "application/json")


def _phrase(status: int) -> str:
    """Returns the words for a status; those that a user's handler has invented have none."""
    return HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
