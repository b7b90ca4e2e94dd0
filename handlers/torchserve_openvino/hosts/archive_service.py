"""`ArchiveService`: an archive made for TorchServe, loaded and proven; requests in, answers out, without TorchServe."""

import asyncio
import importlib
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any

from torchserve_openvino.config.yaml_source import Source, read_yaml
from torchserve_openvino.errors import InvalidInputError, ItemError, ModelLoadError
from torchserve_openvino.files.json_text import read_json_object
from torchserve_openvino.hosts.model_settings import ModelSettings
from torchserve_openvino.packaging.archive import extract
from torchserve_openvino.serving.loading.archive_manifest import MANIFEST, named_files
from torchserve_openvino.serving.loading.labels import own_classes
from torchserve_openvino.serving.requests.isolation import isolated, server_fault
from torchserve_openvino.serving.requests.json_body import parse_json
from torchserve_openvino.serving.requests.messages import MOST_JOINING, Request, Response
from torchserve_openvino.serving.requests.metric_sink import Record
from torchserve_openvino.serving.requests.refusals import RefusalForm
from torchserve_openvino.serving.torchserve.base import missing_torchserve, worker_of
from torchserve_openvino.serving.torchserve.cached_metrics import HostMetrics
from torchserve_openvino.serving.torchserve.calls import with_report
from torchserve_openvino.serving.torchserve.context import Context
from torchserve_openvino.serving.torchserve.handler_base import HandlerBase
from torchserve_openvino.tasks.standard.refusal_forms import form_of_path

logger = logging.getLogger(__name__)


class ArchiveService:
    """One loaded archive.

    Args:
        archive: The .mar, or the folder into which it was unpacked.
        record: Gets metrics.
        folder: Folder to unpack into; a private temporary one, if None.
        workers: Workers of the model on this machine, which share its cores; None leaves that to the YAML.
        keeps_idle: Whether a worker that nobody needs stays, or starts again as soon as it ends.

    Attributes:
        record: Gets metrics.
        handler: The archive's handler.
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

    def __init__(
        self,
        archive: Path,
        record: Record,
        folder: Path | None = None,
        workers: int | None = None,
        keeps_idle: bool = True,
    ) -> None:
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
        settings = ModelSettings.read(archive, model, source)
        self.name, self.version, self.batch_size = settings.name, settings.version, settings.batch_size
        self.delay, self.timeout, self.awaits = settings.delay, settings.timeout, settings.awaits
        self.ended = ""
        self._context = Context(manifest, str(folder), config, self.batch_size, HostMetrics(record))
        self._context.workers, self._context.keeps_idle = workers, keeps_idle
        self.handler = _handler_of(folder, model["handler"])
        self.handler.initialize(self._context)

    def describe(self) -> dict[str, Any]:
        """Returns the report, as ``GET /models/NAME?customized=true`` has it; JSON-safe."""
        return with_report(self.handler.describe_handle(), worker_of(self.handler).describe)

    def send_counts(self) -> None:
        """Passes on what was counted since the last call, which else waits for the next one; from any thread."""
        worker = worker_of(self.handler)
        worker.state.emit(worker.metrics)

    def send_spans(self) -> None:
        """Sends the spans of all requests that were answered, before the process ends without Python's own end."""
        if (tracing := worker_of(self.handler).tracing) is not None:
            tracing.send()

    def answer(self, requests: Sequence[Request]) -> list[Response]:
        """Answers requests of one call, each with its own status, and bytes as its body.

        Args:
            requests: The requests; all in the same envelope.
        """
        worker = worker_of(self.handler)
        try:
            # Threads of `answer_alone` run a user's own code one after the other.
            with nullcontext() if worker.is_task else worker.turn:
                responses = worker.answer(requests)
            return [self._encoded(*pair) for pair in zip(responses, requests, strict=True)]
        except SystemExit:
            self.ended = "the worker violates its policy"
            return [self._refused(_replaced(self.ended), request) for request in requests]
        except Exception as error:
            # TorchServe answers the whole call with a server error, too.
            fault = server_fault(error)
            return [self._refused(fault, request) for request in requests]

    async def answer_alone(self, request: Request) -> Response:
        """Answers one request that joins others in the model's own engine; see `awaits`."""
        (response,) = await asyncio.get_running_loop().run_in_executor(self._joining, self.answer, [request])
        return response

    @cached_property
    def _joining(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(MOST_JOINING, "request")

    def _encoded(self, response: Response, request: Request) -> Response:
        """Returns a response in bytes; one that can't be sent is refused, and no other."""
        encoded = isolated(response.encoded)
        return self._refused(encoded, request) if isinstance(encoded, ItemError) else encoded

    def _refused(self, error: ItemError, request: Request) -> Response:
        return self.refused(error, request.id, form_of_path(request.path, request.envelope))

    def refused(self, error: ItemError, name: str, form: RefusalForm | None) -> Response:
        """Returns the response to a request that the handler does not answer, and counts it; from any thread.

        Args:
            error: Why it is refused.
            name: The request's id.
            form: Makes the body, as the client reads it; None for this package's own form.
        """
        worker_of(self.handler).counters.add(f"refused_{error.status}")
        return Response.refused(error, name, form)


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
    classes = [cls for cls in own_classes(module) if issubclass(cls, HandlerBase)]
    if len(classes) != 1:
        raise ModelLoadError(
            f"the archive's handler {name} defines {len(classes)} OpenVINO handlers, and must define one. To serve a "
            f"handler of your own as it is, set handler.openvino.wrap: {name}, and package it behind one of this "
            f'package\'s: --handler "$(torchserve-openvino handler-path tensor)" --extra-files {name}.'
        )
    return classes[0]()


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
