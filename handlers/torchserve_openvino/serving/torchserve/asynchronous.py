"""How responses leave a worker of TorchServe: pieces, and its two ways of calling a handler.

With ``asyncCommunication: true`` TorchServe 0.12 awaits the handler once for each request, so that requests join the
engine as they come. Its frontend and `ts.async_service` have faults that this module goes around; tests/contract pins
what it relies on:

- Final responses are written to the socket by a thread of their own, intermediate ones by whoever sends them. Two
  messages that are longer than a socket buffer would mix. `keep_messages_whole` puts a lock around each message.
- The frontend keeps a request until a response says ``ts_stream_next: false``, which an answer in one piece never does:
  it would be kept forever, and answered again when the model is scaled down. So each answer ends with an empty message
  that says so.
- `async_service` prints a line for each request while other threads send metrics. `keep_messages_whole` keeps lines
  whole.
- A response whose message has another status than 200 is sent to all requests in flight. So nothing may be raised.
- It loses requests, and with them the worker, for a reason that no worker can go around: `torchserve-openvino frontend`
  patches it. `checked_frontend` says whether that was done.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from http import HTTPStatus
from typing import Any

from torchserve_openvino.errors import FrontendError
from torchserve_openvino.frontend import COMMAND, Frontend
from torchserve_openvino.serving.metrics import keep_metrics_apart
from torchserve_openvino.serving.requests.isolation import server_fault
from torchserve_openvino.serving.requests.messages import MOST_JOINING, Response
from torchserve_openvino.serving.torchserve.context import Context

logger = logging.getLogger(__name__)

_writing = threading.Lock()


class _OneAtATime(socket.socket):
    """A socket whose messages are not mixed."""

    # Without a layout of its own, so that a socket can become one.
    __slots__ = ()

    def sendall(self, *arguments: Any) -> None:
        """Sends everything before another thread's message begins."""
        with _writing:
            super().sendall(*arguments)


def is_awaited() -> bool:
    """Whether TorchServe awaits the handler: it is called in an event loop (``asyncCommunication``)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def keep_messages_whole(context: Any) -> None:
    """Lets threads write to the worker's socket, and to its output, one after the other."""
    connection = getattr(context, "cl_socket", None)
    if type(connection) is socket.socket:
        connection.__class__ = _OneAtATime
        keep_metrics_apart()


def checked_frontend(context: Any) -> dict[str, str]:
    """Returns the entry ``frontend`` of the report, and warns if TorchServe's loses requests; empty elsewhere."""
    if isinstance(context, Context):
        return {}
    try:
        state = Frontend.installed().state
    except FrontendError as error:
        logger.warning("TorchServe's frontend was not checked: %s", error)
        return {"frontend": "unknown"}
    if state in ("faulty", "outdated"):
        logger.warning(
            "WARNING: with asyncCommunication: true this TorchServe sometimes loses a request, and all others with it, "
            "until it is started again. Run `%s`, and start TorchServe again.", COMMAND,
        )  # fmt: skip
    return {"frontend": state}


def close_connection(context: Any) -> None:
    """Closes the connection to the frontend, in the middle of a call, so that TorchServe starts another worker.

    TorchServe has no message for this, but replaces a worker whose connection is closed. It answers the requests that
    it sent to this worker (500, "Worker died."), but loses those that it is collecting for the next batch: their
    clients wait forever. It collects none while it waits for an answer, so a worker may end only during a call.
    """
    connection = getattr(context, "cl_socket", None)
    if isinstance(connection, socket.socket):
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.warning("The connection to the frontend is closed already: %s", error)


def set_head(context: Any, index: int, response: Response) -> None:
    """Sets the status and the content type of a response in the context, but for what a handler set there itself."""
    if response.status != HTTPStatus.OK and context.get_response_status(index)[0] != response.status:
        context.set_response_status(int(response.status), _phrase(response.status), index)
    content_type = response.content_type
    if not content_type and isinstance(response.body, bytes) and not context.get_response_content_type(index):
        content_type = "application/octet-stream"
    if content_type:
        context.set_response_content_type(index, content_type)


def _phrase(status: int) -> str:
    """Returns the words for a status; those that a user's handler has invented have none."""
    return HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""


def send_piece(context: Any, index: int, piece: Response) -> None:
    """Sends the first or the next piece of a response; other requests of the call go on waiting.

    Args:
        context: The call's context.
        index: The request's place in the call.
        piece: The piece.
    """
    from ts.handler_utils.utils import send_intermediate_predict_response

    set_head(context, index, piece)
    ids = {index: context.request_ids[index]}
    send_intermediate_predict_response({index: piece.body}, ids, "Prediction", HTTPStatus.OK.value, context)


def whole_response(context: Any, run: Callable[[], list[Any]]) -> list[Any] | Coroutine[Any, Any, list[Any]]:
    """Returns the bodies that ``run`` makes, or what waits for them where TorchServe awaits the handler."""
    if not is_awaited():
        return run()
    _end(context)
    return _in_thread(run)


def answered_later(context: Any, answer: Callable[[], Response | list[Any]]) -> Coroutine[Any, Any, list[Any]]:
    """Returns what waits for the response to a call's only request, and sends it; bodies in a list go as they are."""

    def run() -> list[Any]:
        try:
            response = answer()
        except SystemExit:
            close_connection(context)
            raise
        except Exception as error:
            # What is raised here would fail all requests in flight.
            response = Response.refused(server_fault(error), str(context.request_ids.get(0) or ""))
        if isinstance(response, list):
            _end(context)
            return response
        return _sent(context, response)

    return _in_thread(run)


async def _in_thread(run: Callable[[], list[Any]]) -> list[Any]:
    return await asyncio.get_running_loop().run_in_executor(_threads(), run)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_JOINING, "request")


def _sent(context: Any, response: Response) -> list[Any]:
    """Sends the response to the only request of a call; returns what ends it."""
    if response.status < HTTPStatus.BAD_REQUEST:
        send_piece(context, 0, response)
    else:
        from ts.protocol.otf_message_handler import create_predict_response

        set_head(context, 0, response)
        # TorchServe closes the connection after the head of such a response, so that it has to be one piece.
        message = create_predict_response([response.body], context.request_ids, "Prediction", 200, context)
        context.cl_socket.sendall(message)
    _end(context)
    return [""]


def _end(context: Any) -> None:
    """Lets the response to the only request of a call end with what the call returns."""
    context.stopping_criteria = {0: lambda _: True}
