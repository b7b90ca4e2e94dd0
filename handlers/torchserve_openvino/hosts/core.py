"""`Host`: an archive made for TorchServe, loaded and proven; requests in, answers out, without TorchServe."""

import importlib
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from torchserve_openvino.config.yaml_source import Source, read_yaml
from torchserve_openvino.errors import InvalidInputError, ItemError, ModelLoadError, PackagingError
from torchserve_openvino.files.json_text import read_json_object
from torchserve_openvino.hosts.messages import Kind, Request, Response
from torchserve_openvino.hosts.settings import DELAY_MS, TIMEOUT_SECONDS
from torchserve_openvino.packaging.archive import extract, read_packed_config
from torchserve_openvino.serving.base import missing_torchserve, worker_of
from torchserve_openvino.serving.handler import HandlerBase
from torchserve_openvino.serving.host.context import Context, encoded
from torchserve_openvino.serving.host.metrics import HostMetrics, Record
from torchserve_openvino.serving.host.names import own_classes
from torchserve_openvino.serving.loading.archive import MANIFEST, batch_size_of, named_files
from torchserve_openvino.serving.requests.envelopes import Envelope
from torchserve_openvino.serving.requests.isolation import isolated, server_fault
from torchserve_openvino.serving.requests.json_body import parse_json

logger = logging.getLogger(__name__)

# Handlers read these forms of bodies. Upstream's `json` decodes {"b64": ...}, as KServe's v1 protocol has it.
_ENVELOPES: dict[Kind, Envelope] = {
    "json": Envelope("json"),
    "kserve": Envelope("kserve"),
    "kservev2": Envelope("kservev2"),
}


class Host:
    """One loaded archive.

    Args:
        archive: The .mar, or the folder into which it was unpacked.
        record: Gets metrics.
        folder: Folder to unpack into; a private temporary one, if None.
        workers: Workers of the model on this machine, which share its cores; None leaves that to the YAML.

    Attributes:
        record: Gets metrics.
        name: The model's name.
        version: Its version.
        batch_size: Most requests that it answers at once.
        delay: Seconds that a request waits for others.
        timeout: Seconds in which requests have to be answered.
        awaits: Whether requests join each other in the model's own engine, so that each is a call of its own.
        ended: Why this process has to be replaced; empty while it may serve.

    Raises:
        ModelLoadError: The archive's handler needs TorchServe, or is refused.
        PackagingError: The file is no archive.
    """

    def __init__(self, archive: Path, record: Record, folder: Path | None = None, workers: int | None = None) -> None:
        if archive.is_dir():
            folder = archive
        elif folder is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="torchserve-openvino-")
            folder = Path(self._scratch.name)
        if folder != archive:
            extract(archive, folder)
        manifest = read_json_object(folder / MANIFEST)
        model = named_files(manifest, folder)
        name = model.get("configFile")
        source = read_yaml(folder / name) if name else Source({}, "defaults")
        config = dict(source.data)
        self.record = record
        self.name, self.version = str(model["modelName"]), str(model.get("modelVersion") or "1.0")
        self.batch_size = batch_size_of(source)
        self.delay = float(config.get("maxBatchDelay", DELAY_MS)) / 1e3
        self.timeout = float(config.get("responseTimeout", TIMEOUT_SECONDS))
        self.awaits = bool(config.get("asyncCommunication"))
        self.ended = ""
        self._context = Context(manifest, str(folder), config, self.batch_size, HostMetrics(record))
        self._context.workers = workers
        self._handler = _handler_of(folder, model["handler"])
        self._handler.initialize(self._context)

    def describe(self) -> dict[str, Any]:
        """Returns the report, as ``GET /models/NAME?customized=true`` has it; JSON-safe."""
        return self._handler.describe_handle()

    def answer(
        self,
        requests: Sequence[Request],
        send: Callable[[int, Response], None],
        is_gone: Callable[[int], bool] | None = None,
    ) -> list[Response]:
        """Answers requests of one call, each with its own status.

        Args:
            requests: The requests; all in the same envelope.
            send: Gets pieces of answers that are streamed, with the index of their request.
            is_gone: Returns True if the client of the request at an index has hung up.
        """
        context = self._context_of(requests, send, is_gone)
        rows = [dict(each.row) for each in requests]
        try:
            if requests[0].envelope is not None:
                bodies = worker_of(self._handler).handle_envelope(_ENVELOPES[requests[0].envelope], rows, context)
            else:
                bodies = self._handler.handle(rows, context)
            if len(bodies) != len(requests):
                raise RuntimeError(f"the handler returned {len(bodies)} answers to {len(requests)} requests")
            return [self._to_response(context, index, body) for index, body in enumerate(bodies)]
        except SystemExit:
            self.ended = "the worker violates its policy"
            return [Response.refused(_replaced(self.ended), each.id) for each in requests]
        except Exception as error:
            # TorchServe answers the whole call with a server error, too.
            fault = server_fault(error)
            return [Response.refused(fault, each.id) for each in requests]

    async def answer_alone(
        self,
        request: Request,
        send: Callable[[int, Response], None],
        is_gone: Callable[[int], bool] | None = None,
    ) -> Response:
        """Answers one request whose handler is awaited; see `awaits`."""
        context = self._context_of([request], send, is_gone)
        rows = [dict(request.row)]
        try:
            if request.envelope is not None:
                called = worker_of(self._handler).handle_envelope(_ENVELOPES[request.envelope], rows, context)
            else:
                called = self._handler.handle(rows, context)
            (body,) = await called
            return self._to_response(context, 0, body)
        except SystemExit:
            self.ended = "the worker violates its policy"
            return Response.refused(_replaced(self.ended), request.id)
        except Exception as error:
            return Response.refused(server_fault(error), request.id)

    def _to_response(self, context: Context, index: int, body: Any) -> Response:
        """Returns what is sent for one request; a body that can't be sent is refused, and no other."""
        response = isolated(lambda: _response(context, index, body))
        return Response.refused(response) if isinstance(response, ItemError) else response

    def _context_of(
        self,
        requests: Sequence[Request],
        send: Callable[[int, Response], None],
        is_gone: Callable[[int], bool] | None,
    ) -> Context:
        def send_piece(index: int, body: Any) -> None:
            send(index, _response(context, index, body))

        context = self._context.for_requests(
            [each.id for each in requests], [each.headers for each in requests], send_piece
        )
        if is_gone is not None:
            context.is_gone = is_gone
        context.arrived = [each.arrived for each in requests]
        return context


def _handler_of(folder: Path, name: str) -> Any:
    """Returns the archive's handler, not initialized yet.

    Raises:
        ModelLoadError: It can't be imported here, or is not one of this package's.
    """
    if not (folder / name).is_file():
        raise ModelLoadError(
            f"the archive's handler is {name}, TorchServe's own. Package it with a handler of this package: "
            f"`torchserve-openvino package`, or handler.openvino.wrap: {name}."
        )
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(Path(name).stem)
    except ImportError as error:
        needed = missing_torchserve(error)
        raise ModelLoadError(f"the archive's handler {name} cannot be imported: {error}.{needed}") from error
    classes = [each for each in own_classes(module) if issubclass(each, HandlerBase)]
    if len(classes) != 1:
        raise ModelLoadError(
            f"the archive's handler {name} defines {len(classes)} OpenVINO handlers, and must define one. A handler of "
            f"your own is served by handler.openvino.wrap: {name}."
        )
    return classes[0]()


def _response(context: Context, index: int, body: Any) -> Response:
    content, content_type = encoded(body)
    return Response(
        content, context.get_response_content_type(index) or content_type, context.get_response_status(index)[0]
    )


def _replaced(reason: str) -> ItemError:
    error = ItemError(f"{reason}, and is being replaced: send the request again")
    error.status = HTTPStatus.SERVICE_UNAVAILABLE.value
    return error


def row_of(body: bytes, content_type: str, parameters: Mapping[str, str]) -> dict[str, Any]:
    """Returns a request as TorchServe passes it to a handler.

    Args:
        body: The request's body.
        content_type: Its type; JSON is parsed, and text is decoded.
        parameters: Those of the URL.

    Raises:
        InvalidInputError: The body is not of its type.
    """
    kind, value = content_type.partition(";")[0].strip().lower(), body
    if kind == "application/json":
        return {**parameters, "body": parse_json(value)}
    if kind.startswith("text"):
        try:
            return {**parameters, "body": value.decode()}
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"the body is not valid {kind}: {error.reason} at byte {error.start}") from error
    return {**parameters, "body": bytearray(value)}


def about(archive: Path) -> tuple[str, dict[str, Any]]:
    """Returns an archive's name and YAML, without unpacking it.

    Raises:
        PackagingError: The file is no archive.
        ConfigError: Its YAML is not valid.
    """
    model, source = read_packed_config(archive)
    if "modelName" not in model:
        raise PackagingError(f"{archive}: {MANIFEST} names no model.")
    return str(model["modelName"]), dict(source.data)
