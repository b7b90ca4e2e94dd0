"""Serves an archive as a KServe predictor, by its v1 and v2 protocols (REST and gRPC).

    python -m torchserve_openvino.hosts.kserve --model net.mar --http_port 8080 --grpc_port 8081

Standard clients find ``POST /v1/embeddings`` and others (`http.STANDARD`) and ``GET /v1/models``, there and below
``/openai``.
The server listens once the archive is loaded and verified. ``GET /v1/models/NAME/report`` is the report. An item that
is refused has its refusal in its place; the request fails only if all of its items do, with the status of the first.
"""

import argparse
import base64
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

try:
    import grpc
    import uvicorn
    from fastapi import HTTPException
    from grpc import StatusCode
    from grpc_interceptor.exceptions import GrpcException
    from kserve import InferInput, InferOutput, InferRequest, InferResponse, Model, ModelServer, model_server
    from kserve.model_server import app
    from kserve.protocol.grpc import server as rpc
    from kserve.protocol.rest import server as rest
except ImportError as error:
    if __name__ == "__main__":
        sys.exit(f"error: {error}: pip install 'torchserve-openvino[kserve]'")
    raise

from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError
from torchserve_openvino.hosts import http
from torchserve_openvino.hosts.archive_service import ArchiveService
from torchserve_openvino.hosts.batcher import Batcher, not_ready, predictions
from torchserve_openvino.hosts.model_settings import ModelSettings
from torchserve_openvino.hosts.prometheus import PrometheusMetrics
from torchserve_openvino.serving.requests.messages import (
    EXPLAIN_HEADER,
    HEALTH_HEADER,
    PATH_HEADER,
    EnvelopeKind,
    Request,
    request_id,
)

_V1: EnvelopeKind = "json"
_V2: EnvelopeKind = "kservev2"
_LIST = "/v1/models"
_GRPC: dict[int, StatusCode] = {
    HTTPStatus.NOT_FOUND: StatusCode.NOT_FOUND,
    HTTPStatus.NOT_IMPLEMENTED: StatusCode.UNIMPLEMENTED,
    HTTPStatus.SERVICE_UNAVAILABLE: StatusCode.UNAVAILABLE,
}


class Archive(Model):
    """A .mar as a model of KServe's.

    Args:
        archive: The .mar.
    """

    def __init__(self, archive: Path) -> None:
        super().__init__(ModelSettings.of(archive).name)
        self._archive = archive
        self._service: ArchiveService | None = None
        self._batcher: Batcher | None = None
        self._loaded: dict[str, float] = {}

    def load(self) -> bool:
        """Loads and verifies the model."""
        # A predictor is one process, with the container's cores for itself.
        self._service = ArchiveService(self._archive, PrometheusMetrics().record, workers=1)
        self._batcher = Batcher(self._service)
        self._loaded = {self.name: time.time()}
        self.ready = True
        return True

    @property
    def _may_go_on(self) -> bool:
        """Whether this process may go on: nothing violated its policy, no call took too long."""
        return self.ready and self._service is not None and not self._service.ended

    async def healthy(self) -> bool:
        """Answers readiness probes: returns True if the warm-up sample is answered rightly, and the policy holds."""
        if not self._may_go_on or self._batcher is None:
            return False
        return not await not_ready(self._batcher)

    async def alive(self) -> dict[str, bool]:
        """Answers liveness probes.

        Raises:
            HTTPException: This process has to be replaced.
        """
        if not self._may_go_on:
            raise HTTPException(
                HTTPStatus.SERVICE_UNAVAILABLE, self._service.ended if self._service is not None else ""
            )
        return {"alive": True}

    def report(self) -> dict[str, Any]:
        """Returns the report; JSON-safe."""
        assert self._service is not None
        return self._service.describe()

    async def models(self, request: HttpRequest) -> HttpResponse:
        """Answers ``GET /v1/models``, which is KServe's list as well as OpenAI's, and its like below ``/openai``."""
        forwarded = await http.ForwardedRequest.of(request, 0)
        answer = http.models(forwarded, self._loaded)
        if request.url.path == _LIST:
            answer = replace(answer, body=json.dumps({**json.loads(answer.body), "models": [self.name]}).encode())
        return await http.response(http.only(answer))

    def standard(self, largest: int) -> Callable[[HttpRequest], Awaitable[HttpResponse]]:
        """Returns what answers requests of standard clients, of at most ``largest`` bytes."""

        async def answered(request: HttpRequest) -> HttpResponse:
            assert self._batcher is not None
            try:
                forwarded = await http.ForwardedRequest.of(request, largest)
            except PayloadTooLargeError as error:
                return await http.response(http.only(http.refused(error)))
            return await http.response(predictions(self._batcher, forwarded))

        return answered

    async def predict(
        self, payload: Any, headers: dict[str, str] | None = None, response_headers: dict[str, str] | None = None
    ) -> Any:
        """Answers one request of either protocol."""
        over_grpc = isinstance(payload, InferRequest) and payload.from_grpc is True
        try:
            envelope, body = (_V2, _inputs(payload)) if isinstance(payload, InferRequest) else (_V1, payload)
        except InvalidInputError as error:
            raise _failure(error.status, {"message": str(error)}, over_grpc) from error
        name = request_id((headers or {}).get("x-request-id"))
        assert self._batcher is not None
        # What the host says of a request replaces what a client claims.
        said = {PATH_HEADER, EXPLAIN_HEADER, HEALTH_HEADER}
        claimed = {key: value for key, value in (headers or {}).items() if key.lower() not in said}
        request = Request({"body": body}, {**claimed, EXPLAIN_HEADER: "False"}, name, envelope)
        (answer,) = [piece async for piece in self._batcher.submit(request)]
        content = json.loads(answer.body)
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise _failure(answer.status, content, over_grpc)
        if envelope == _V1:
            return content
        outputs = [
            InferOutput(output["name"], output["shape"], output["datatype"], _data(output))
            for output in content["outputs"]
        ]
        return InferResponse(content.get("id") or name, self.name, outputs)


def _inputs(request: InferRequest) -> dict[str, Any]:
    """Returns the JSON form of a request; bytes that are no text become base64, as TorchServe's handlers take them."""
    return {"id": request.id, "inputs": [_input(tensor) for tensor in request.inputs]}


def _input(tensor: InferInput) -> dict[str, Any]:
    """Returns the JSON form of an input; data that came as JSON is left to the handler, which reads it within bounds.

    Raises:
        InvalidInputError: Binary data is not of its type and shape.
    """
    data = tensor.data
    if not isinstance(data, list) or not data:
        # Binary data, of which there is no list.
        try:
            data = tensor.as_numpy().reshape(-1).tolist()
        except Exception as error:
            # NumPy's and KServe's errors of all kinds.
            raise InvalidInputError(f"input {tensor.name!r}: {error}") from error
    data = [_text(item) if isinstance(item, bytes) else item for item in data]
    return {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype, "data": data}


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def _data(output: dict[str, Any]) -> list[Any]:
    """Returns an output's elements: of BYTES, text, which is JSON for anything else."""
    if output["datatype"] != "BYTES":
        return list(output["data"])
    return [item if isinstance(item, str) else json.dumps(item) for item in output["data"]]


def _failure(status: int, content: Any, over_grpc: bool) -> Exception:
    """Returns the error that gives a request this status."""
    first = next(iter(content.get("predictions") or content.get("outputs") or [content]))
    message = (
        first.get("message") or (first.get("data") or [{}])[0].get("message", "") if isinstance(first, dict) else ""
    )
    if not over_grpc:
        return HTTPException(status, message)
    code = StatusCode.INTERNAL if status >= HTTPStatus.INTERNAL_SERVER_ERROR else StatusCode.INVALID_ARGUMENT
    return GrpcException(message, _GRPC.get(status, code))


def listen_on(host: str) -> None:
    """Makes KServe's servers listen on one address; KServe 0.21 has no option for it, and listens on all.

    Args:
        host: An IPv4 address or a name, for HTTP and gRPC.
    """

    class Config(uvicorn.Config):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "host": host})

    class Aio:
        """`grpc.aio` with a server that listens there."""

        def server(self, *args: Any, **kwargs: Any) -> Any:
            server = grpc.aio.server(*args, **kwargs)
            add = server.add_insecure_port
            server.add_insecure_port = lambda address: add(f"{host}:{address.rpartition(':')[2]}")
            return server

    rest.uvicorn = SimpleNamespace(**{**vars(uvicorn), "Config": Config})
    rpc.aio = Aio()


def main() -> None:
    """Serves the archive that the command line names."""
    parser = argparse.ArgumentParser(parents=[model_server.parser], description=__doc__, conflict_handler="resolve")
    parser.add_argument("--model", required=True, type=Path, help="the .mar, or a folder with one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 in a container")
    parser.add_argument(
        "--max_request_bytes", type=int, default=http.LARGEST, help="larger requests of standard clients are refused"
    )
    arguments = parser.parse_args()
    model: Path = arguments.model
    archives = sorted(model.glob("*.mar")) if model.is_dir() else [model]
    if len(archives) != 1:
        parser.error(f"--model: {model} holds {len(archives)} .mar files, and must hold one")
    archive = Archive(archives[0])
    archive.load()
    app.add_api_route(f"/v1/models/{archive.name}/report", archive.report, methods=["GET"])
    for prefix in ("", "/openai"):
        for path in http.STANDARD:
            app.add_route(f"{prefix}/{path}", archive.standard(arguments.max_request_bytes), methods=["POST"])
        app.add_route(f"{prefix}{_LIST}", archive.models, methods=["GET"])
    app.add_route(f"/openai{_LIST}/{{name}}", archive.models, methods=["GET"])
    app.add_api_route("/openvino/alive", archive.alive, methods=["GET"])
    listen_on(arguments.host)
    ModelServer().start([archive])


if __name__ == "__main__":
    main()
