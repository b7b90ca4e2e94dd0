"""From answers and refusals to what TorchServe sends: bodies, statuses and content types."""

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from torchserve_openvino.errors import InvalidInputError, ItemError
from torchserve_openvino.serving.counters import Counters
from torchserve_openvino.serving.envelopes import Envelope, Request, status_of

AnswerItems = Callable[[list[Any]], list[Any]]


def refusal(error: ItemError) -> dict[str, Any]:
    """What the sender of a refused item reads."""
    return {"code": error.status, "type": type(error).__name__, "message": str(error)}


def finish(answers: Sequence[Any], context: Any, counters: Counters) -> list[Any]:
    """Bodies of plain requests, one item each; statuses and content types go into the context."""
    bodies: list[Any] = []
    for index, answer in enumerate(answers):
        if isinstance(answer, ItemError):
            _set_status(context, index, answer.status)
            counters.add(f"refused_{answer.status}")
            bodies.append(refusal(answer))
        else:
            if isinstance(answer, bytes):
                context.set_response_content_type(index, "application/octet-stream")
            bodies.append(answer)
    return bodies


def answer_enveloped(
    envelope: Envelope, data: Sequence[Any], context: Any, answer_items: AnswerItems, counters: Counters
) -> list[Any]:
    """Bodies of enveloped requests, each with any number of items.

    Args:
        answer_items: All items of the batch to as many answers or `ItemError`.
    """
    requests: list[Request | ItemError] = [_opened(envelope, row) for row in data]
    items = [item for request in requests if isinstance(request, Request) for item in request.items]
    good = [item for item in items if not isinstance(item, ItemError)]
    answered = iter(answer_items(good) if good else [])
    bodies: list[Any] = []
    for index, request in enumerate(requests):
        if isinstance(request, ItemError):
            answers: list[Any] = [request]
        else:
            answers = [item if isinstance(item, ItemError) else next(answered) for item in request.items]
        for answer in answers:
            if isinstance(answer, ItemError):
                counters.add(f"refused_{answer.status}")
        _set_status(context, index, status_of(answers))
        if isinstance(request, ItemError):
            bodies.append(refusal(request))
        else:
            shown = [refusal(a) if isinstance(a, ItemError) else a for a in answers]
            bodies.append(envelope.close(request, shown, context, index))
    return bodies


def _opened(envelope: Envelope, row: Any) -> Request | ItemError:
    try:
        return envelope.open(row)
    except InvalidInputError as error:
        return error


def _set_status(context: Any, index: int, status: int) -> None:
    if status != HTTPStatus.OK:
        context.set_response_status(status, HTTPStatus(status).phrase, index)
        context.set_response_content_type(index, "application/json")
