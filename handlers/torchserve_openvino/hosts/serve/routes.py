"""The URLs of `serve`: TorchServe's, KServe's version 2, those of standard clients, and Prometheus'."""

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

import anyio
import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from torchserve_openvino.errors import (
    ItemError,
    PayloadTooLargeError,
    TorchServeOpenVINOError,
    UnsupportedMediaTypeError,
)
from torchserve_openvino.hosts import http
from torchserve_openvino.hosts.serve.registry import Registry
from torchserve_openvino.hosts.serve.served_archive import ServedArchive
from torchserve_openvino.hosts.serve.worker_process import Pending
from torchserve_openvino.serving.requests.messages import (
    EXPLAIN_HEADER,
    HEALTH_HEADER,
    PATH_HEADER,
    EnvelopeKind,
    Response,
    request_id,
    unavailable_error,
    unhealthy_reason,
)
from torchserve_openvino.serving.requests.refusals import RefusalForm, with_error
from torchserve_openvino.tasks.standard.refusal_forms import form_of_path

logger = logging.getLogger(__name__)

_NAME = "torchserve-openvino"
_ID = "x-request-id"
_STREAM = "text/event-stream"
# The last is an IPv4 client of a server that listens on IPv6, too.
_LOOPBACK = {"127.0.0.1", "::1", "localhost", "::ffff:127.0.0.1"}
# A short wait for the end of an answer whose first piece is there; one that goes on is sent in pieces.
_END_SECONDS = 0.005
# Seconds after which a request is watched for its client's hanging up.
_WATCH_SECONDS = 0.05
# Seconds in which a request's body has to arrive.
_BODY_SECONDS = 60.0
# Bytes of a body that is read in another thread to find the name of its model.
_LONG_BODY = 256 << 10
# Seconds that a description waits for a worker's report.
_REPORT_SECONDS = 10.0
_PREDICT = ["GET", "POST", "PUT"]
_PREDICTIONS = "/predictions/"

Endpoint = Callable[[Request], Awaitable[Any]]

if sys.version_info >= (3, 11):
    _within = asyncio.timeout
else:

    @contextlib.asynccontextmanager
    async def _within(seconds: float) -> AsyncIterator[None]:
        with anyio.fail_after(seconds):
            yield


async def _refused_url(request: Request, error: Exception) -> HttpResponse:
    """Answers a URL or a method that is not served, in the form of other refusals."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path} is not served here: {error.detail}"
    if request.url.path.strip("/") in {path.removeprefix("v1/") for path in http.STANDARD}:
        message += ". The base URL of OpenAI's and Cohere's clients ends with /v1"
    body = {"code": error.status_code, "type": HTTPStatus(error.status_code).phrase, "message": message}
    if (form := _form_of(request)) is not None:
        refused = ItemError(message)
        refused.status = error.status_code
        body = form(refused)
    return JSONResponse(body, error.status_code, headers=dict(error.headers or {}))


def _form_of(request: Request) -> RefusalForm | None:
    """Returns how refusals of a request are read that has not reached a model."""
    whole = request.url.path.strip("/")
    if whole.startswith("v2/models/"):
        return with_error
    if not whole.startswith(("predictions/", "explanations/")):
        return form_of_path(whole.removeprefix(http.OPENAI_PREFIX))
    rest = request.path_params.get("rest", "").strip("/")
    version, _, path = rest.partition("/")
    return form_of_path(path if http.is_version(version) else rest)


class PendingResponse:
    """An ASGI response that sends the pieces of an answer as they come, and sees the client hang up.

    Args:
        model: Answers the request.
        pending: The request.
    """

    def __init__(self, model: ServedArchive, pending: Pending) -> None:
        self._model, self._pending = model, pending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        # Most responses are there before a client hangs up; a task for each to see it takes as long as to read it.
        watches: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        late = loop.call_later(_WATCH_SECONDS, lambda: watches.append(loop.create_task(self._watch(receive))))
        pieces = self._model.answer(self._pending)
        try:
            first = await anext(pieces)
            stream, old = first.content_type.startswith(_STREAM), scope["http_version"] == "1.0"
            if not self._pending.is_answered and not stream:
                await asyncio.sleep(_END_SECONDS)
            headers = {**first.headers, _ID: self._pending.id}
            # HTTP/1.0 has no chunks.
            if old or (self._pending.is_answered and not stream):
                whole = await http.joined(first, pieces)
                response = HttpResponse(whole.body, whole.status, headers, media_type=whole.content_type)
                await response(scope, receive, send)
                return
            start = HttpResponse(None, first.status, headers, media_type=first.content_type)
            raw = [(name, value) for name, value in start.raw_headers if name != b"content-length"]
            await send({"type": "http.response.start", "status": first.status, "headers": raw})
            await send({"type": "http.response.body", "body": first.body, "more_body": True})
            async for piece in pieces:
                if http.breaks_off(first, piece) and not stream:
                    # Too late for a status, and no place for a word.
                    logger.warning("request %s: the response breaks off: %s", self._pending.id, piece.body)
                    return
                await send({"type": "http.response.body", "body": http.streamed(first, piece), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            late.cancel()
            for watch in watches:
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch
            await pieces.aclose()  # type: ignore[attr-defined]

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._pending.hang_up()


class Site:
    """The endpoints of one server.

    Args:
        registry: Its models.
        metrics: Where metrics are collected.
        most_bytes: Most bytes of a request's body.

    Attributes:
        drains: Whether the server stops: what runs is answered, new requests are refused.
    """

    def __init__(
        self, registry: Registry, metrics: prometheus_client.CollectorRegistry, most_bytes: int = http.LARGEST
    ) -> None:
        self._registry, self._metrics, self._most_bytes = registry, metrics, most_bytes
        self.drains = False
        self._probes: dict[ServedArchive, asyncio.Task[str]] = {}

    def app(self) -> ASGIApp:
        """Returns the application."""
        others, predict = self._others(), self._answering(self.predict)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            # Starlette's layers and routes take longer than all else that is done here for a request.
            if scope["type"] == "http" and scope["path"].startswith(_PREDICTIONS) and scope["method"] in _PREDICT:
                name, _, rest = scope["path"].removeprefix(_PREDICTIONS).partition("/")
                scope["path_params"] = {"name": name, "rest": rest}
                response = await predict(Request(scope, receive, send))
                await response(scope, receive, send)
            else:
                await others(scope, receive, send)

        return app

    def _others(self) -> Starlette:
        """Returns the application for all but predictions; of these, it refuses other methods."""
        routes = [
            Route("/ping", self._answering(self.ping)),
            Route("/metrics", self.metrics),
            Route("/models", self._answering(self.models)),
            Route("/models/{name}", self._answering(self.describe)),
            Route("/models/{name}/{version}", self._answering(self.describe)),
            Route("/models/{name}/reload", self._answering(self.reload), methods=["POST"]),
            Route("/models/{name}/{version}/reload", self._answering(self.reload), methods=["POST"]),
            Route("/predictions/{name}", self._answering(self.predict), methods=_PREDICT),
            Route("/predictions/{name}/{rest:path}", self._answering(self.predict), methods=_PREDICT),
            Route("/explanations/{name}", self._answering(self.predict), methods=_PREDICT),
            Route("/explanations/{name}/{rest:path}", self._answering(self.predict), methods=_PREDICT),
            Route("/v2/health/live", self._answering(self.live)),
            Route("/v2/health/ready", self._answering(self.ready)),
            Route("/v2", self._answering(self.server)),
        ]
        for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            routes += [
                Route(path, self._answering(self.metadata)),
                Route(f"{path}/ready", self._answering(self.model_ready)),
                Route(f"{path}/infer", self._answering(self.infer), methods=["POST"]),
            ]
        for prefix in ("", "/openai"):
            routes += [
                Route(f"{prefix}/{path}", self._answering(self.standard), methods=["POST"]) for path in http.STANDARD
            ]
            routes += [Route(f"{prefix}/v1/models{more}", self._answering(self.list_models)) for more in ("", "/{id}")]
        return Starlette(routes=routes, exception_handlers={HTTPException: _refused_url})

    def _answering(self, endpoint: Endpoint) -> Endpoint:
        """Returns an endpoint whose refusals are sent to the client; those of predictions are counted."""
        counts = endpoint in (self.predict, self.infer, self.standard)

        async def answered(request: Request) -> Any:
            try:
                return await endpoint(request)
            except ItemError as error:
                if counts:
                    getattr(request.state, "model", self._registry).count_refusal(error)
                name = request_id(request.headers.get(_ID))
                refused = Response.refused(error, name, _form_of(request))
                # A server that stops has no use for the connection.
                headers = {_ID: name, **({"connection": "close"} if self.drains else {})}
                return HttpResponse(refused.body, refused.status, headers, media_type=refused.content_type)
            except ClientDisconnect:
                return PlainTextResponse("", 400)

        return answered

    # --- health -------------------------------------------------------------------------------------------------

    @property
    def problems(self) -> list[str]:
        """Why some model can't answer now; empty if all can."""
        if self.drains:
            return ["the server stops"]
        return [f"{model.label}: {model.problem}" for model in self._registry if model.problem]

    async def ping(self, request: Request) -> HttpResponse:
        """Answers TorchServe's ``GET /ping``: healthy if each model has a worker that is ready, or rests."""
        if problems := self.problems:
            body = {"status": "Unhealthy", "reason": "; ".join(problems)}
            return JSONResponse(body, HTTPStatus.SERVICE_UNAVAILABLE)
        return JSONResponse({"status": "Healthy"})

    async def live(self, request: Request) -> HttpResponse:
        """Answers ``GET /v2/health/live``."""
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> HttpResponse:
        """Answers ``GET /v2/health/ready``: a worker of each model answers its warm-up sample, or the model rests."""
        models = list(self._registry)
        answers = zip(models, await asyncio.gather(*map(self._problem, models)), strict=True)
        answer = http.readiness(f"{answer.label}: {problem}" for answer, problem in answers if problem)
        return await http.response(http.only(answer))

    async def model_ready(self, request: Request) -> HttpResponse:
        """Answers ``GET /v2/models/NAME/ready``."""
        problem = await self._problem(self._model(request))
        body = {"name": request.path_params["name"], "ready": not problem, **({"reason": problem} if problem else {})}
        return JSONResponse(body, HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK)

    async def _problem(self, model: ServedArchive) -> str:
        """Returns why a model is not ready; empty if a worker answers its warm-up sample rightly, or it rests."""
        if self.drains:
            return "the server stops"
        if model.problem or model.rests_or_wakes:
            return model.problem
        # One at a time: clients give up on probes of a busy model, and ask again.
        probe = self._probes.get(model)
        if probe is None:
            probe = self._probes[model] = asyncio.create_task(self._probe(model))
            probe.add_done_callback(lambda _: self._probes.pop(model))
        return await asyncio.shield(probe)

    async def _probe(self, model: ServedArchive) -> str:
        pending = Pending(b"{}", "application/json", headers={HEALTH_HEADER: "1", "explain": "False"},
                          id=uuid.uuid4().hex, arrived=time.time())  # fmt: skip
        pieces = [piece async for piece in model.answer(pending)]
        return unhealthy_reason(b"".join(piece.body for piece in pieces))

    async def metrics(self, request: Request) -> HttpResponse:
        """Answers ``GET /metrics``."""
        for model in self._registry:
            model.show()
        text = await asyncio.to_thread(prometheus_client.generate_latest, self._metrics)
        return HttpResponse(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    # --- models -------------------------------------------------------------------------------------------------

    def _model(self, request: Request) -> ServedArchive:
        return self._registry.model(request.path_params["name"], request.path_params.get("version"))

    async def models(self, request: Request) -> HttpResponse:
        """Answers ``GET /models``."""
        entries = [
            {"modelName": model.settings.name, "modelVersion": model.settings.version, "modelUrl": model.archive.name,
             "status": model.state}
            for model in self._registry
        ]  # fmt: skip
        return JSONResponse({"models": entries})

    async def describe(self, request: Request) -> HttpResponse:
        """Answers ``GET /models/NAME[/VERSION]``, with a worker's report if ``customized`` is true."""
        name, version = request.path_params["name"], request.path_params.get("version")
        archives = self._registry.versions(name) if version == "all" else [self._model(request)]
        entries = []
        for archive in archives:
            entry = archive.describe()
            if request.query_params.get("customized", "").lower() == "true":
                report = await archive.report(_REPORT_SECONDS)
                state = "all workers are busy" if archive.state == "READY" else f"it is {archive.state}"
                entry["customizedMetadata"] = report if report is not None else archive.problem or state
            entries.append(entry)
        return HttpResponse(json.dumps(entries, indent=2, default=str), media_type="application/json")

    async def reload(self, request: Request) -> HttpResponse:
        """Answers ``POST /models/NAME/reload``, from this machine only."""
        client = request.client.host if request.client is not None else ""
        if client not in _LOOPBACK or {"forwarded", "x-forwarded-for", "origin"} & set(request.headers):
            error = ItemError("a model is reloaded from this machine only, and not by a browser or through a proxy")
            error.status = HTTPStatus.FORBIDDEN.value
            raise error
        name, version = request.path_params["name"], request.path_params.get("version")
        if self.drains:
            raise unavailable_error("the server stops")
        try:
            model = await self._registry.reload(name, version)
        except ItemError:
            raise
        except (TorchServeOpenVINOError, OSError) as error:
            body = {"code": 409, "type": type(error).__name__, "message": f"{error} The former state goes on."}
            return JSONResponse(body, HTTPStatus.CONFLICT)
        return JSONResponse({"status": f"{model.label} is reloaded"})

    async def server(self, request: Request) -> HttpResponse:
        """Answers ``GET /v2``."""
        own = importlib.metadata.version(_NAME)
        return JSONResponse({"name": _NAME, "version": own, "extensions": []})

    async def metadata(self, request: Request) -> HttpResponse:
        """Answers ``GET /v2/models/NAME``."""
        model = self._model(request)
        versions = [other.settings.version for other in self._registry.versions(model.settings.name)]
        body = {"name": model.settings.name, "versions": versions, "platform": "torchserve_openvino"}
        return JSONResponse({**body, "inputs": [], "outputs": []})

    async def list_models(self, request: Request) -> Any:
        """Answers ``GET /v1/models`` and ``GET /v1/models/NAME``, as OpenAI's clients read them."""
        loaded = {name: self._registry.model(name).loaded for name in self._registry.names}
        path = f"v1/models/{request.path_params['id']}" if "id" in request.path_params else "v1/models"
        forwarded = http.ForwardedRequest("GET", "", path, b"", {}, {})
        return await http.response(http.only(http.models(forwarded, loaded)))

    # --- requests -----------------------------------------------------------------------------------------------

    async def predict(self, request: Request) -> Any:
        """Answers TorchServe's ``/predictions/NAME[/VERSION][/PATH]``, and ``/explanations/`` likewise."""
        name, rest = request.path_params["name"], request.path_params.get("rest", "").strip("/")
        version, _, path = rest.partition("/")
        known = {model.settings.version for model in self._registry.versions(name)}
        if version not in known and not http.is_version(version):
            version, path = "", rest
        explains = request.scope["path"].startswith("/explanations/")
        find = partial(self._registry.model, name, version or None)
        return await self._answer(request, find, {PATH_HEADER: path, EXPLAIN_HEADER: str(explains)})

    async def infer(self, request: Request) -> Any:
        """Answers ``POST /v2/models/NAME/infer``."""
        if "inference-header-content-length" in request.headers:
            raise UnsupportedMediaTypeError("binary tensors are not supported here: send data as JSON")
        return await self._answer(request, partial(self._model, request), {}, "kservev2")

    async def standard(self, request: Request) -> Any:
        """Answers requests of standard clients."""
        path = request.url.path.strip("/").removeprefix(http.OPENAI_PREFIX)
        body = await self._body(request)
        names = self._registry.names
        name = names[0]
        if len(names) > 1:
            forwarded = http.ForwardedRequest("POST", "", path, body, {}, {})
            # Reading a long body takes a while, in which nobody else would be answered.
            if len(body) > _LONG_BODY:
                name = await asyncio.to_thread(http.named_model, forwarded, names)
            else:
                name = http.named_model(forwarded, names)
        return await self._answer(request, partial(self._registry.model, name), {PATH_HEADER: path}, body=body)

    async def _body(self, request: Request) -> bytes:
        """Reads a request's body.

        Raises:
            UnsupportedMediaTypeError: It is a form.
            PayloadTooLargeError: It is longer than is allowed.
            ItemError: It does not arrive in time.
        """
        if request.headers.get("content-type", "").lower().startswith("multipart/"):
            raise UnsupportedMediaTypeError("forms are not read here: send the file as the body (curl -T FILE)")
        limit = f"{self._most_bytes} bytes (--max-request-bytes)"
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._most_bytes:
            raise PayloadTooLargeError(f"the request has {length} bytes; the most is {limit}")
        body = bytearray()
        try:
            async with _within(_BODY_SECONDS):
                async for chunk in request.stream():
                    body.extend(chunk)
                    if len(body) > self._most_bytes:
                        raise PayloadTooLargeError(f"the request has more than {limit}")
        except TimeoutError:
            late = ItemError(f"the body did not arrive within {_BODY_SECONDS:g} s")
            late.status = HTTPStatus.REQUEST_TIMEOUT.value
            raise late from None
        return bytes(body)

    async def _answer(
        self,
        request: Request,
        find: Callable[[], ServedArchive],
        headers: Mapping[str, str],
        envelope: EnvelopeKind | None = None,
        body: bytes | None = None,
    ) -> Any:
        """Answers a request.

        Args:
            request: The request.
            find: Returns its model; called again once the body is there, since a reload may have replaced it.
            headers: What the server itself says of the request.
            envelope: The protocol of the body.
            body: The body, if it was read already.
        """
        request.state.model = find()
        name = request_id(request.headers.get(_ID))
        kind = request.headers.get("content-type", "")
        if body is None:
            body = await self._body(request)
        if self.drains:
            raise unavailable_error("the server stops")
        model = request.state.model = find()
        if HEALTH_HEADER in request.headers and model.rests_or_wakes:
            # A probe is no reason to load it, and does not wait for it.
            return JSONResponse({"healthy": True, "idle": True}, headers={_ID: name})
        self._registry.wake(model)
        # The first of equal headers counts. What the server says of a request replaces what a client claims.
        claimed = dict(reversed(request.headers.items()))
        pending = Pending(
            body, kind, dict(request.query_params), {**claimed, PATH_HEADER: "", EXPLAIN_HEADER: "False", **headers},
            name, envelope, time.time(),
        )  # fmt: skip
        return PendingResponse(model, pending)
