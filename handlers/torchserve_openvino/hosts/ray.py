"""Serves archives on Ray Serve; `app` is the builder that Ray's config files name.

    applications:
      - name: models
        import_path: torchserve_openvino.hosts.ray:app
        args: {archives: [net.mar], cpus: 2, replicas: 2}

Answers are those of TorchServe at ``POST /predictions/NAME``; standard clients find ``POST /v1/embeddings`` and others
(`http.STANDARD`). ``GET /models/NAME`` is the report of one replica, and ``GET /models/NAME/replicas`` of all.
``GET /v2/health/ready`` runs the warm-up sample of each model. The YAML's batchSize, maxBatchDelay and responseTimeout
apply to each replica.
"""

import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.util import metrics as ray_metrics
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from torchserve_openvino.errors import ItemError, ModelMissingError, PackagingError, PayloadTooLargeError
from torchserve_openvino.hosts import http
from torchserve_openvino.hosts.archive_service import ArchiveService
from torchserve_openvino.hosts.batcher import QUEUE_SIZE, Batcher, not_ready, predictions
from torchserve_openvino.hosts.model_settings import ModelSettings
from torchserve_openvino.serving.requests.messages import Response
from torchserve_openvino.serving.requests.phases import BOUNDS, SECONDS

logger = logging.getLogger(__name__)


class AppArgs(BaseModel):
    """Arguments of `app`."""

    model_config = ConfigDict(extra="forbid")

    archives: list[str] = Field(min_length=1, description="Paths of .mar files, readable on each node.")
    cpus: float = Field(default=1, gt=0, description="CPUs of each replica, which sets its threads.")
    replicas: int = Field(default=1, ge=1, description="Replicas of each model; with max_replicas, the fewest.")
    max_replicas: int | None = Field(default=None, ge=1, description="Scales up to so many by ongoing requests.")
    max_request_bytes: int = Field(default=http.LARGEST, ge=1, description="Larger requests are refused (413).")


class Replica:
    """One replica of one model.

    Args:
        archive: The .mar.
        largest: Most bytes of a request.
    """

    def __init__(self, archive: str, largest: int) -> None:
        self._service = ArchiveService(Path(archive), RayMetrics().record)
        self._batcher = Batcher(self._service)
        self._largest = largest
        self._loaded = {self._service.name: time.time()}

    def check_health(self) -> None:
        """Fails if this replica has to be replaced, so that Ray does.

        Raises:
            RuntimeError: The policy is violated, or a call takes too long.
        """
        if self._service.ended:
            raise RuntimeError(self._service.ended)

    def describe(self) -> dict[str, Any]:
        """Returns the report; JSON-safe."""
        return {**self._service.describe(), "replica": serve.get_replica_context().replica_id.unique_id}

    async def reports(self) -> list[dict[str, Any]]:
        """Returns the reports of all replicas."""
        replica_context = serve.get_replica_context()
        return list(
            await serve.get_deployment_handle(replica_context.deployment, replica_context.app_name)
            .broadcast("describe")
            .results_async()
        )

    async def pieces(self, forwarded: http.ForwardedRequest) -> AsyncIterator[Response]:
        """Yields the pieces of the answer to one request."""
        name = self._service.name
        if forwarded.model and forwarded.model != name:
            yield Response.refused(ModelMissingError(f"no model {forwarded.model!r} is served here; there is {name}"))
            return
        if forwarded.lists_models:
            yield http.models(forwarded, self._loaded)
            return
        if forwarded.asks_ready:
            yield http.readiness(filter(None, [self._service.ended or await not_ready(self._batcher)]))
            return
        if forwarded.method == "GET":
            report = await self.reports() if forwarded.path == "replicas" else self.describe()
            yield Response(json.dumps(report).encode(), "application/json")
            return
        async for piece in predictions(self._batcher, forwarded):
            yield piece

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        """Answers one request over HTTP."""
        return await _respond(request, self._largest, self.pieces)


async def _respond(request: HttpRequest, largest: int, route: Any) -> HttpResponse:
    try:
        forwarded = await http.ForwardedRequest.of(request, largest)
    except PayloadTooLargeError as error:
        return await http.response(http.only(Response.refused(error)))
    return await http.response(route(forwarded))


class Router:
    """Passes requests on to the model that their path names, where an app has several.

    Args:
        models: Handles by name.
        largest: Most bytes of a request.
    """

    def __init__(self, models: dict[str, Any], largest: int) -> None:
        self._models = {name: handle.options(method_name="pieces", stream=True) for name, handle in models.items()}
        self._largest = largest
        self._loaded = dict.fromkeys(models, time.time())

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        """Passes one request on."""
        return await _respond(request, self._largest, self._route)

    def _route(self, forwarded: http.ForwardedRequest) -> AsyncIterator[Response]:
        if forwarded.lists_models and not forwarded.model:
            return http.only(http.models(forwarded, self._loaded))
        if forwarded.asks_ready and not forwarded.model:
            return self._ready(forwarded)
        if forwarded.path in http.STANDARD and not forwarded.model:
            try:
                return aiter(self._models[http.named_model(forwarded, self._models)].remote(forwarded))
            except ItemError as error:
                return http.only(http.refused(error))
        if forwarded.model in self._models:
            return aiter(self._models[forwarded.model].remote(forwarded))
        known = ", ".join(sorted(self._models))
        missing = ModelMissingError(f"no model {forwarded.model!r} is served here; there are {known}")
        return http.only(Response.refused(missing))

    async def _ready(self, forwarded: http.ForwardedRequest) -> AsyncIterator[Response]:
        """Yields whether a replica of each model is ready."""
        answers = {name: await anext(aiter(handle.remote(forwarded))) for name, handle in self._models.items()}
        states = {name: json.loads(answer.body) for name, answer in answers.items()}
        yield http.readiness(f"{name}: {state['reason']}" for name, state in states.items() if not state["ready"])


def app(args: AppArgs) -> serve.Application:
    """Builds an application of one or several archives."""
    models = {}
    archives: dict[str, str] = {}
    for archive in args.archives:
        settings = ModelSettings.of(Path(archive))
        if (other := archives.setdefault(settings.name, archive)) != archive:
            raise PackagingError(
                f"{other} and {archive} both hold a model {settings.name!r}: an app serves one of a name."
            )
        scaling: dict[str, Any] = {"num_replicas": args.replicas}
        if args.max_replicas:
            ongoing = 2 * settings.batch_size
            limits = {"min_replicas": args.replicas, "max_replicas": args.max_replicas}
            scaling = {"autoscaling_config": {**limits, "target_ongoing_requests": ongoing}}
        deployment = serve.deployment(Replica).options(
            name=settings.name, ray_actor_options={"num_cpus": args.cpus},
            # More than the replica's own queue takes, so that it refuses: Ray would keep what comes beyond.
            max_ongoing_requests=2 * QUEUE_SIZE + settings.batch_size, **scaling,
        )  # fmt: skip
        models[settings.name] = deployment.bind(archive, args.max_request_bytes)
    router = serve.deployment(Router).options(ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=1000)
    return next(iter(models.values())) if len(models) == 1 else router.bind(models, args.max_request_bytes)


# --- metrics by Ray -----------------------------------------------------------------------------------------------


class RayMetrics:
    """Hands metrics to Ray, which adds application, deployment and replica."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._dropped: set[str] = set()

    def record(self, kind: str, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Takes one value; see `serving.requests.metric_sink.Record`. What Ray does not allow is dropped, said once."""
        try:
            self._record(kind, name, value, labels)
        except (ValueError, TypeError, AttributeError) as error:
            # A handler's own metric, of a kind or with labels that its name did not have before.
            if name not in self._dropped:
                self._dropped.add(name)
                logger.warning("The metric %s is dropped: %s", name, error)

    def _record(self, kind: str, name: str, value: float, labels: Mapping[str, str]) -> None:
        if (metric := self._metrics.get(name)) is None:
            metric = self._metrics[name] = self._made(kind, name, tuple(labels))
        if kind == "gauge":
            metric.set(value, dict(labels))
        elif kind == "histogram":
            metric.observe(value, dict(labels))
        elif value > 0:
            # Ray refuses an increase by 0.
            metric.inc(value, dict(labels))

    @staticmethod
    def _made(kind: str, name: str, labels: tuple[str, ...]) -> Any:
        if kind == "histogram":
            return ray_metrics.Histogram(name, boundaries=list(BOUNDS.get(name, BOUNDS[SECONDS])), tag_keys=labels)
        return {"gauge": ray_metrics.Gauge, "counter": ray_metrics.Counter}[kind](name, tag_keys=labels)
