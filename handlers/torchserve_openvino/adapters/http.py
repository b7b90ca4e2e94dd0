"""Requests over HTTP as TorchServe has them, for hosts that run in a web server of their own (Starlette)."""

import re
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from torchserve_openvino.adapters.batcher import Batcher
from torchserve_openvino.adapters.core import Answered, Asked, row_of
from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError

_STREAM = "text/event-stream"
_ID = "x-request-id"


@dataclass(frozen=True)
class Sent:
    """A request to ``/predictions/MODEL[/VERSION][/PATH]``, which processes can pass to each other.

    Attributes:
        method: GET or POST.
        model: The model's name.
        path: What follows it, without a version.
        body: The body.
        headers: Headers by name, in lower case.
        parameters: The URL's parameters.
    """

    method: str
    model: str
    path: str
    body: bytes
    headers: dict[str, str]
    parameters: dict[str, str]

    @staticmethod
    async def of(request: Request, largest: int) -> "Sent":
        """Reads a request.

        Raises:
            PayloadTooLargeError: Its body has more than ``largest`` bytes.
        """
        parts = request.url.path.strip("/").split("/")
        model, path = (parts[1:2] or [""])[0], parts[2:]
        if path and re.fullmatch(r"\d+(\.\d+)*", path[0]):
            del path[0]
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > largest:
                raise PayloadTooLargeError(f"the request has more than {largest} bytes (max_request_bytes)")
        headers, parameters = dict(request.headers), dict(request.query_params)
        return Sent(request.method, model, "/".join(path), bytes(body), headers, parameters)


async def predictions(batcher: Batcher, sent: Sent) -> AsyncIterator[Answered]:
    """Yields the pieces of the answer to a request."""
    try:
        row = row_of(sent.body, sent.headers.get("content-type", ""), sent.parameters)
    except InvalidInputError as error:
        yield Answered.refused(error)
        return
    # As TorchServe tells handlers which of OpenAI's endpoints was asked.
    headers = {**sent.headers, "url_path": sent.path}
    async for piece in batcher.ask(Asked(row, headers, sent.headers.get(_ID) or uuid.uuid4().hex)):
        yield piece


async def only(answer: Answered) -> AsyncIterator[Answered]:
    """Yields an answer in one piece."""
    yield answer


async def response(pieces: AsyncIterator[Answered]) -> Response:
    """Returns the response with these pieces, as a stream where the handler sends events."""
    first = await anext(pieces)
    if first.content_type.startswith(_STREAM):
        return StreamingResponse(_stream(first, pieces), first.status, media_type=first.content_type)
    return Response(first.body, first.status, media_type=first.content_type)


async def _stream(first: Answered, pieces: AsyncIterator[Answered]) -> AsyncIterator[bytes]:
    yield first.body
    async for piece in pieces:
        yield piece.body
