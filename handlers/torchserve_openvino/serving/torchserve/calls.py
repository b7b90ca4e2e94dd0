"""Calls of TorchServe: requests out of its data and context, and responses back into them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from torchserve_openvino.serving.requests.messages import EXPLAIN_HEADER, EnvelopeKind, Request, Response
from torchserve_openvino.serving.torchserve import asynchronous

# Keys that only a report has all of.
_OF_REPORTS = frozenset({"schema", "summary", "serving", "pid"})


def answered_call(worker: Any, data: Sequence[Any], context: Any, envelope: EnvelopeKind | None = None) -> Any:
    """Answers a call of a handler; returns bodies, or a coroutine of them where TorchServe awaits the handler.

    Args:
        worker: The handler's.
        data: The requests, as TorchServe passes them.
        context: The call's context; gets statuses and content types.
        envelope: The envelope around the requests.

    Raises:
        PredictionException: See `check_statuses_arrive`.
        SystemExit: The worker has to be replaced.
    """
    handler = worker.handler
    asynchronous.keep_messages_whole(context)
    awaits = asynchronous.is_awaited()
    if awaits and not worker.is_task:
        return asynchronous.answered_later(context, partial(_in_turn, worker, data, context, envelope))
    handler.context = context
    if handler._is_describe():
        return asynchronous.whole_response(context, lambda: [with_report(handler.describe_handle(), worker.describe)])
    requests = requests_of(data, context, envelope)
    if awaits:
        return asynchronous.answered_later(context, lambda: worker.answer(requests)[0])
    try:
        responses = worker.answer(requests)
    except SystemExit:
        asynchronous.close_connection(context)
        raise
    check_statuses_arrive(requests, responses)
    for index, response in enumerate(responses):
        asynchronous.set_head(context, index, response)
    return [response.body for response in responses]


def _in_turn(worker: Any, data: Sequence[Any], context: Any, envelope: EnvelopeKind | None) -> Response | list[Any]:
    """Answers a call of a user's own code, which finds the context on the handler, and nobody else's meanwhile."""
    handler = worker.handler
    with worker.turn:
        handler.context = context
        if handler._is_describe():
            return [with_report(handler.describe_handle(), worker.describe)]
        response: Response = worker.answer(requests_of(data, context, envelope))[0]
        return response


def with_report(own: Any, report: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the report, with what a handler's own code describes.

    Args:
        own: What it describes, under ``handler`` in the result; its keys are also at the top, where the report has no
            key of that name. None if it describes nothing; it may have the report in it already.
        report: Makes the report.
    """
    keys = own if isinstance(own, dict) else {}
    if keys.keys() >= _OF_REPORTS:
        return keys
    return report() if own is None else {**keys, **report(), "handler": own}


def requests_of(data: Sequence[Any], context: Any, envelope: EnvelopeKind | None = None) -> list[Request]:
    """Returns the requests of a call.

    Args:
        data: As TorchServe passes them.
        context: The call's context.
        envelope: The envelope around the requests.
    """
    over_rest = getattr(context, "request_processor", None) is not None
    ids = getattr(context, "request_ids", None)
    # A user's test may have a context that has anything under each name.
    names = ids if isinstance(ids, Mapping) else {}
    requests = []
    for index, row in enumerate(data):
        headers = context.get_all_request_header(index) if over_rest else {}
        headers = headers if isinstance(headers, Mapping) else {}
        send = partial(asynchronous.send_piece, context, index)
        has_status = EXPLAIN_HEADER in headers
        requests.append(
            Request(row, headers, str(names.get(index) or ""), envelope, has_own_status=has_status, send=send)
        )
    return requests


def check_statuses_arrive(requests: Sequence[Request], responses: Sequence[Response]) -> None:
    """Fails the whole call if a refusal would be sent as a success.

    TorchServe supports a status for each request only over HTTP. It drops them over gRPC and between the nodes of a
    workflow: a refusal would count as an answer, and go on to the next node.

    Raises:
        PredictionException: A refused request can't have its own status; TorchServe fails the whole call with it.
    """
    pairs = zip(requests, responses, strict=True)
    lost = [response.error for request, response in pairs if response.error is not None and not request.has_own_status]
    if not lost:
        return
    from ts.utils.util import PredictionException

    error = lost[0]
    text = f"{type(error).__name__}: {error}"
    if all(response.error is not None for response in responses):
        raise PredictionException(text, error.status)
    raise PredictionException(
        f"another request of the same batch was refused ({text}); with gRPC and workflows, TorchServe has one status "
        "for the whole batch: send yours again, or set batchSize: 1",
        HTTPStatus.SERVICE_UNAVAILABLE.value,
    )
