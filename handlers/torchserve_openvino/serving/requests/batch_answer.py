"""Turns answers and refusals into responses: bodies, statuses and content types."""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

from torchserve_openvino.errors import ItemError, PayloadTooLargeError
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.requests.envelopes import Content, Envelope, status_of
from torchserve_openvino.serving.requests.isolation import isolated
from torchserve_openvino.serving.requests.messages import JSON, Request, Response
from torchserve_openvino.serving.requests.refusals import RefusalForm, refusal, shortened, with_error, with_request_id
from torchserve_openvino.serving.requests.response_body import check_length, finite, sendable

logger = logging.getLogger(__name__)

AnswerItems = Callable[[list[Any], Sequence[Request]], list[Any]]


class AnswerList(list[Any]):
    """The answers to one request with a list of inputs; each may be an `ItemError`."""


class SelfWritten(ABC):
    """An answer that writes itself as JSON, faster than TorchServe would.

    Attributes:
        refusal_form: Makes the body of the refusal that is sent instead, if the answer is too long; see `ItemError`.
    """

    refusal_form: RefusalForm | None = None

    @abstractmethod
    def least_bytes(self) -> int:
        """Returns a number of bytes that it has at least, found without writing it."""

    @abstractmethod
    def plain(self) -> Any:
        """Returns the answer as plain JSON data, for envelopes."""

    @abstractmethod
    def written(self) -> bytes:
        """Returns the answer as JSON."""


def refused(error: ItemError, request: Request) -> Response:
    """Returns the response to a refused request, with the request's id, by which the log names a server error."""
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("Request %s is answered with %d: %s", request.id or None, error.status, shortened(str(error)))
    if request.envelope == "kservev2" and error.form is None:
        error.form = with_error
    return Response(with_request_id(refusal(error), request.id), JSON, error.status, error)


def finish(
    answers: Sequence[Any],
    requests: Sequence[Request],
    counters: Counters,
    most_bytes: int | None,
    refusal_form: RefusalForm | None = None,
) -> list[Response]:
    """Returns the responses to plain requests, one item each.

    Args:
        answers: An answer, a whole response, or an `ItemError` for each request.
        requests: The requests.
        counters: Counts refusals.
        most_bytes: The most that the host sends as one body; None if it has no limit.
        refusal_form: Makes the bodies of refusals, as their clients read them; None for this package's own form.
    """
    responses = []
    for answer, request in zip(answers, requests, strict=True):
        response = answer if isinstance(answer, ItemError) else isolated(partial(_sendable, answer, most_bytes))
        if isinstance(response, ItemError):
            form = answer.refusal_form if isinstance(answer, SelfWritten) else refusal_form
            response.form = form or response.form
            _count_refusals([response], counters)
            response = refused(response, request)
        else:
            _count_refusals([answer], counters)
        responses.append(response)
    return responses


def _count_refusals(answers: Sequence[Any], counters: Counters) -> None:
    for answer in answers:
        if isinstance(answer, ItemError):
            counters.add(f"refused_{answer.status}")
        elif isinstance(answer, AnswerList):
            _count_refusals(answer, counters)


def _each(answers: Sequence[Any]) -> list[Any]:
    """Returns the answers of a request, those to an item with several inputs one by one."""
    return [item for answer in answers for item in (answer if isinstance(answer, AnswerList) else [answer])]


def _sendable(answer: Any, most_bytes: int | None) -> Response:
    """Returns the response with the answer to a plain request.

    Raises:
        ItemError: It can't be sent.
    """
    if isinstance(answer, Response):
        return replace(answer, body=sendable(answer.body, most_bytes))
    if isinstance(answer, SelfWritten):
        check_length(answer.least_bytes(), most_bytes)
        return Response(sendable(answer.written(), most_bytes), JSON)
    if not isinstance(answer, AnswerList):
        return Response(sendable(answer, most_bytes))
    check_length(sum(item.least_bytes() for item in answer if isinstance(item, SelfWritten)), most_bytes)
    writes_itself = any(isinstance(item, SelfWritten) for item in answer)
    body = b"[%b]" % b",\n".join(map(_json, answer)) if writes_itself else shown(answer)
    return Response(sendable(body, most_bytes), JSON, status_of(answer))


def _json(answer: Any) -> bytes:
    return answer.written() if isinstance(answer, SelfWritten) else json.dumps(finite(shown(answer)), indent=2).encode()


def shown(answer: Any) -> Any:
    """Returns an answer or a refusal as plain data."""
    if isinstance(answer, ItemError):
        return refusal(answer)
    if isinstance(answer, SelfWritten):
        return answer.plain()
    return [shown(item) for item in answer] if isinstance(answer, AnswerList) else answer


def answer_enveloped(
    envelope: Envelope,
    requests: Sequence[Request],
    answer_items: AnswerItems,
    counters: Counters,
    most_items: int | None,
    most_bytes: int | None,
) -> list[Response]:
    """Returns the responses to enveloped requests, each with any number of items.

    Args:
        envelope: Reads and writes bodies.
        requests: The requests.
        answer_items: Maps the items of the batch, and the request of each, to as many answers, each of which may be an
            `ItemError`.
        counters: Counts refusals.
        most_items: The most items in one request; None if the handler sets no limit.
        most_bytes: The most that the host sends as one body; None if it has no limit.
    """
    opened = [isolated(partial(_opened, envelope, request, most_items)) for request in requests]
    good = [
        (request, item)
        for request, content in zip(requests, opened, strict=True)
        if isinstance(content, Content)
        for item in content.items
        if not isinstance(item, ItemError)
    ]
    answered = iter(answer_items([item for _, item in good], [request for request, _ in good]) if good else [])
    responses = []
    for request, content in zip(requests, opened, strict=True):
        if isinstance(content, ItemError):
            _count_refusals([content], counters)
            responses.append(refused(content, request))
            continue
        answers = [item if isinstance(item, ItemError) else next(answered) for item in content.items]
        body = isolated(partial(_closed, envelope, content, answers, request, most_bytes))
        if isinstance(body, ItemError):
            _count_refusals([body], counters)
            responses.append(refused(body, request))
            continue
        _count_refusals(answers, counters)
        single = _each(answers)
        status = status_of(single)
        refusals = [answer for answer in single if isinstance(answer, ItemError)]
        error = refusals[0] if len(refusals) == len(single) else None
        responses.append(Response(body, "" if status == HTTPStatus.OK else JSON, status, error))
    return responses


def _opened(envelope: Envelope, request: Request, most: int | None) -> Content:
    content = envelope.open(request.row)
    if most is not None and len(content.items) > most:
        raise PayloadTooLargeError(f"{len(content.items)} inputs in one request; the most is {most}: send several")
    return content


def _closed(
    envelope: Envelope, content: Content, answers: Sequence[Any], request: Request, most_bytes: int | None
) -> Any:
    """Returns the body that answers an enveloped request.

    Raises:
        ItemError: It can't be sent.
    """
    single = _each(answers)
    check_length(sum(item.least_bytes() for item in single if isinstance(item, SelfWritten)), most_bytes)
    body = envelope.close(content, list(map(shown, answers)), request)
    if envelope.kind == "kservev2" and all(isinstance(answer, ItemError) for answer in single):
        body = {"error": shortened(str(single[0])), **body}
    return sendable(body, most_bytes)
