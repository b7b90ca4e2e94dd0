"""Requests over HTTP as TorchServe has them, for hosts that run in a web server of their own (Starlette)."""

import json
import re
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus

from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse

from torchserve_openvino.errors import ItemError, PayloadTooLargeError
from torchserve_openvino.serving.requests.json_body import parse_json
from torchserve_openvino.serving.requests.messages import Response
from torchserve_openvino.tasks.openai import MODELS, RequestError, models_body, openai_error, unknown_model

# TorchServe's default of max_request_size.
LARGEST = 6_553_500
# Paths that standard clients add to the address of a host; they name the model in the body, if at all.
STANDARD = (
    "v1/embeddings", "v1/completions", "v1/chat/completions", "v1/images/generations", "v1/rerank", "v2/rerank",
    "rerank", "embed", "embed_sparse", "predict",
)  # fmt: skip
_LIST = f"v1/{MODELS}"
_READY = "v2/health/ready"
_READY_URL = re.compile(r"v2/(?:health|models/(?P<model>[^/]+)(?:/versions/[^/]+)?)/ready")
# As KServe's own servers of language models have it.
OPENAI_PREFIX = "openai/"
_STREAM = "text/event-stream"


@dataclass(frozen=True)
class ForwardedRequest:
    """A request, which processes can pass to each other.

    It was sent to ``/predictions/MODEL[/VERSION][/PATH]``, to a path of `STANDARD` or ``v1/models``, or asks whether a
    model is ready (``v2/health/ready``, ``v2/models/MODEL/ready``).

    Attributes:
        method: GET or POST.
        model: The model's name; empty for one of the other paths.
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
    async def of(request: HttpRequest, largest: int) -> "ForwardedRequest":
        """Reads a request.

        Raises:
            PayloadTooLargeError: Its body has more than ``largest`` bytes.
        """
        whole = request.url.path.strip("/")
        standard = whole.removeprefix(OPENAI_PREFIX)
        parts = whole.split("/")
        model, path = (parts[1:2] or [""])[0], parts[2:]
        if standard in STANDARD or _lists(standard):
            model, path = "", [standard]
        elif readiness_url := _READY_URL.fullmatch(whole):
            model, path = readiness_url["model"] or "", [_READY]
        elif path and is_version(path[0]):
            del path[0]
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > largest:
                raise PayloadTooLargeError(f"the request has more than {largest} bytes (max_request_bytes)")
        headers, parameters = dict(request.headers), dict(request.query_params)
        return ForwardedRequest(request.method, model, "/".join(path), bytes(body), headers, parameters)

    @property
    def lists_models(self) -> bool:
        """Whether it asks for the models that are served, here or below a model's URL."""
        return _lists(self.path)

    @property
    def asks_ready(self) -> bool:
        """Whether it asks if the model, or each of them, is ready."""
        return self.method == "GET" and self.path == _READY


def is_version(text: str) -> bool:
    """Returns True if a part of a path looks like a model's version."""
    return re.fullmatch(r"\d+(\.\d+)*", text) is not None


def _lists(path: str) -> bool:
    return path == _LIST or path.startswith(f"{_LIST}/")


def models(forwarded: ForwardedRequest, loaded: Mapping[str, float]) -> Response:
    """Returns the models that a host serves, or one of them, as OpenAI's clients read them.

    Args:
        forwarded: The request.
        loaded: When each model was loaded, in seconds since 1970.
    """
    try:
        return Response(
            json.dumps(models_body(forwarded.path.removeprefix("v1/"), loaded)).encode(), "application/json"
        )
    except ItemError as error:
        return refused(error)


def refused(error: ItemError) -> Response:
    """Returns a refusal as OpenAI's clients read it."""
    error.form = openai_error
    return Response.refused(error)


def named_model(forwarded: ForwardedRequest, names: Collection[str]) -> str:
    """Returns the model that the body of a standard request names.

    Args:
        forwarded: The request.
        names: The models that are served.

    Raises:
        ItemError: It names none, or another one.
    """
    body = parse_json(forwarded.body)
    name = body.get("model") if isinstance(body, Mapping) else None
    known = ", ".join(sorted(names))
    if not isinstance(name, str):
        raise RequestError(
            f"several models are served here: name one in the field model ({known}), or send the request to "
            f"/predictions/NAME/{forwarded.path}", param="model",
        )  # fmt: skip
    if name not in names:
        raise unknown_model(name, known)
    return name


def readiness(reasons: Iterable[str]) -> Response:
    """Returns the answer to a probe: 200 without a reason why a model is not ready, else 503."""
    reason = "; ".join(reasons)
    body = {"ready": not reason, **({"reason": reason} if reason else {})}
    status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return Response(text.encode(), "application/json", status)


async def only(answer: Response) -> AsyncIterator[Response]:
    """Yields an answer in one piece."""
    yield answer


async def response(pieces: AsyncIterator[Response]) -> HttpResponse:
    """Returns the response with these pieces, as a stream where the handler sends events, else in one piece."""
    first = await anext(pieces)
    if first.content_type.startswith(_STREAM):
        headers = dict(first.headers)
        return StreamingResponse(_stream(first, pieces), first.status, headers, media_type=first.content_type)
    whole = await joined(first, pieces)
    return HttpResponse(whole.body, whole.status, dict(whole.headers), media_type=whole.content_type)


async def joined(first: Response, others: AsyncIterator[Response]) -> Response:
    """Returns the pieces of a response as one; the refusal with which they break off, if they do."""
    pieces = [first, *[piece async for piece in others]]
    if len(pieces) == 1:
        return first
    failed = next((piece for piece in pieces[1:] if breaks_off(first, piece)), None)
    return failed or replace(first, body=b"".join(piece.body for piece in pieces))


def breaks_off(first: Response, piece: Response) -> bool:
    """Returns True if a piece behind the first one is no part of the response, but a refusal.

    A handler may send the text of an error of its own in pieces, whose first one has the status then.
    """
    server_error = int(piece.status) >= HTTPStatus.INTERNAL_SERVER_ERROR
    return server_error or int(first.status) < HTTPStatus.BAD_REQUEST <= int(piece.status)


async def _stream(first: Response, pieces: AsyncIterator[Response]) -> AsyncIterator[bytes]:
    yield first.body
    async for piece in pieces:
        yield streamed(first, piece)


def streamed(first: Response, piece: Response) -> bytes:
    """Returns a piece of a stream of events; where it breaks off, the last event has the refusal.

    In the form of this package's streams, and under ``error``, where OpenAI's clients look for it.
    """
    if not breaks_off(first, piece):
        return piece.body
    try:
        facts = json.loads(piece.body)
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        # A handler's own words.
        facts = {"code": int(piece.status), "message": piece.body.decode(errors="replace")}
    return b"data: %b\n\n" % json.dumps(facts if "error" in facts else {**facts, "error": facts}).encode()
