"""Turns answers and refusals into what TorchServe sends: bodies, statuses and content types."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from torchserve_openvino.errors import InvalidInputError, ItemError
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.requests.envelopes import Envelope, Request, status_of

# A header that TorchServe's HTTP inference API adds to each request; gRPC and workflows do not.
_OVER_HTTP = "explain"

AnswerItems = Callable[[list[Any], Sequence[int]], list[Any]]


class Several(list[Any]):
    """The answers to one request with a list of inputs; each may be an `ItemError`."""


class SelfWritten(ABC):
    """An answer that writes itself as JSON, faster than TorchServe would."""

    @abstractmethod
    def plain(self) -> Any:
        """Returns the answer as plain JSON data, for envelopes."""

    @abstractmethod
    def written(self) -> bytes:
        """Returns the answer as JSON."""


def refusal(error: ItemError) -> dict[str, Any]:
    """Returns the body that the sender of a refused item gets."""
    return {"code": error.status, "type": type(error).__name__, "message": str(error)}


def explains(context: Any, position: int) -> bool:
    """Whether a request was sent to /explanations/."""
    return bool(context.get_request_header(position, _OVER_HTTP) == "True")


def finish(answers: Sequence[Any], context: Any, counters: Counters) -> list[Any]:
    """Returns the bodies of plain requests, one item each; sets statuses and content types in the context.

    Raises:
        PredictionException: See `fail_where_statuses_are_lost`.
    """
    failed = {index: answer for index, answer in enumerate(answers) if isinstance(answer, ItemError)}
    _count_refusals(answers, counters)
    fail_where_statuses_are_lost(context, failed, len(answers))
    bodies: list[Any] = []
    for index, answer in enumerate(answers):
        if isinstance(answer, ItemError):
            set_status(context, index, answer.status)
            bodies.append(refusal(answer))
        else:
            if isinstance(answer, Several):
                set_status(context, index, status_of(answer))
            body = _body(answer)
            if isinstance(body, bytes) and not context.get_response_content_type(index):
                kind = "application/octet-stream" if body is answer else "application/json"
                context.set_response_content_type(index, kind)
            bodies.append(body)
    return bodies


def _count_refusals(answers: Sequence[Any], counters: Counters) -> None:
    for answer in answers:
        if isinstance(answer, ItemError):
            counters.add(f"refused_{answer.status}")
        elif isinstance(answer, Several):
            _count_refusals(answer, counters)


def _each(answers: Sequence[Any]) -> list[Any]:
    """Returns the answers of a request, those to an item with several inputs one by one."""
    return [each for answer in answers for each in (answer if isinstance(answer, Several) else [answer])]


def _body(answer: Any) -> Any:
    """Returns what is sent for the answer to a plain request; bytes if it, or one of several, writes itself."""
    if isinstance(answer, SelfWritten):
        return answer.written()
    if isinstance(answer, Several) and any(isinstance(each, SelfWritten) for each in answer):
        return b"[%b]" % b",\n".join(map(_json, answer))
    return shown(answer)


def _json(answer: Any) -> bytes:
    return answer.written() if isinstance(answer, SelfWritten) else json.dumps(shown(answer), indent=2).encode()


def shown(answer: Any) -> Any:
    """Returns an answer or a refusal as plain data."""
    if isinstance(answer, ItemError):
        return refusal(answer)
    if isinstance(answer, SelfWritten):
        return answer.plain()
    return [shown(each) for each in answer] if isinstance(answer, Several) else answer


def answer_enveloped(
    envelope: Envelope, data: Sequence[Any], context: Any, answer_items: AnswerItems, counters: Counters
) -> list[Any]:
    """Returns the bodies of enveloped requests, each with any number of items.

    Args:
        answer_items: Maps the items of the batch, and the place of the request of each, to as many answers, each of
            which may be an `ItemError`.

    Raises:
        PredictionException: See `fail_where_statuses_are_lost`.
    """
    requests: list[Request | ItemError] = [_opened(envelope, row) for row in data]
    opened = [(index, request) for index, request in enumerate(requests) if isinstance(request, Request)]
    good = [(index, item) for index, request in opened for item in request.items if not isinstance(item, ItemError)]
    answered = iter(answer_items([item for _, item in good], [index for index, _ in good]) if good else [])
    by_request: list[list[Any]] = [
        [request] if isinstance(request, ItemError)
        else [item if isinstance(item, ItemError) else next(answered) for item in request.items]
        for request in requests
    ]  # fmt: skip
    failed = {}
    for index, answers in enumerate(by_request):
        refused = [answer for answer in _each(answers) if isinstance(answer, ItemError)]
        _count_refusals(answers, counters)
        if len(refused) == len(_each(answers)):
            failed[index] = refused[0]
    fail_where_statuses_are_lost(context, failed, len(requests))
    bodies: list[Any] = []
    for index, (request, answers) in enumerate(zip(requests, by_request, strict=True)):
        set_status(context, index, status_of(_each(answers)))
        if isinstance(request, ItemError):
            bodies.append(refusal(request))
        else:
            bodies.append(envelope.close(request, list(map(shown, answers)), context, index))
    return bodies


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


def _opened(envelope: Envelope, row: Any) -> Request | ItemError:
    try:
        return envelope.open(row)
    except InvalidInputError as error:
        return error


def set_status(context: Any, index: int, status: int) -> None:
    """Sets the HTTP status of a request; the body of one that is not 200 is JSON."""
    if status != HTTPStatus.OK:
        context.set_response_status(status, HTTPStatus(status).phrase, index)
        context.set_response_content_type(index, "application/json")
