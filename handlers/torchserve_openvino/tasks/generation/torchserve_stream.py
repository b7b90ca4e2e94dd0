"""How answers leave a worker: TorchServe's intermediate responses, and its two ways of calling a handler.

With ``asyncCommunication: true`` TorchServe 0.12 awaits the handler once for each request, so that requests join the
engine as they come. Its frontend and `ts.async_service` have faults that this module goes around; tests/contract pins
what it relies on:

- Final responses are written to the socket by a thread of their own, intermediate ones by whoever sends them. Two
  messages that are longer than a socket buffer would mix. `one_at_a_time` puts a lock around each message.
- The frontend keeps a request until a response says ``ts_stream_next: false``, which an answer in one piece never does:
  it would be kept forever, and answered again when the model is scaled down. So each answer ends with an empty message
  that says so.
- `async_service` prints a line for each request while other threads send metrics. `one_at_a_time` keeps lines whole.
- A response whose message has another status than 200 is sent to all requests in flight. So nothing may be raised.
- It loses requests, and with them the worker, for a reason that no worker can go around: `torchserve-openvino frontend`
  patches it. `checked_frontend` says whether that was done.
"""

import asyncio
import logging
import socket
import threading
from http import HTTPStatus
from typing import Any

from torchserve_openvino.errors import FrontendError
from torchserve_openvino.frontend import COMMAND, Frontend
from torchserve_openvino.serving.host.context import Context
from torchserve_openvino.serving.metrics import keep_metrics_apart
from torchserve_openvino.serving.requests.pieces import send_pieces

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


def awaits() -> bool:
    """Whether TorchServe awaits the handler: it is called in an event loop (``asyncCommunication``)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def one_at_a_time(context: Any) -> None:
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


def send(context: Any, bodies: dict[int, Any]) -> None:
    """Sends the first or the next piece of some requests' answers.

    Args:
        context: The call's context, with statuses and content types.
        bodies: Pieces by the place of their request.
    """
    send_pieces(context, bodies)


def sent(context: Any, body: Any) -> list[Any]:
    """Sends the answer to the only request of a call; returns what ends it."""
    if isinstance(context, Context) or context.get_response_status(0)[0] < HTTPStatus.BAD_REQUEST:
        send(context, {0: body})
    else:
        # Imported here: other hosts have no TorchServe.
        from ts.protocol.otf_message_handler import create_predict_response

        # TorchServe closes the connection after the head of such a response, so that it has to be one piece.
        context.cl_socket.sendall(create_predict_response([body], context.request_ids, "Prediction", 200, context))
    return ended(context)


def ended(context: Any) -> list[Any]:
    """Returns what ends the answer to the only request of a call."""
    end(context)
    return [""]


def end(context: Any) -> None:
    """Lets the answer to the only request of a call end with what the call returns."""
    context.stopping_criteria = {0: lambda _: True}
