"""Sends pieces of answers before a call to the handler ends."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from torchserve_openvino.serving.host.context import Context


def send_pieces(context: Any, bodies: Mapping[int, Any]) -> None:
    """Sends the first or the next piece of some requests' answers; other requests of the call go on waiting.

    Args:
        context: The call's context, with statuses and content types.
        bodies: Pieces by the place of their request.
    """
    if isinstance(context, Context):
        for place, body in bodies.items():
            context.send_piece(place, body)
        return
    # Imported here: other hosts have no TorchServe.
    from ts.handler_utils.utils import send_intermediate_predict_response

    ids = {place: context.request_ids[place] for place in bodies}
    send_intermediate_predict_response(bodies, ids, "Prediction", HTTPStatus.OK.value, context)


def is_gone(context: Any, place: int) -> bool:
    """Returns True if the client of the request at a place has hung up; TorchServe does not tell its workers."""
    return isinstance(context, Context) and context.is_gone(place)
