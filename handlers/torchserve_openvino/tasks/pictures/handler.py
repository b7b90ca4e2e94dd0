"""Generates pictures with a diffusers pipeline: a prompt in, PNG or JSON out."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torchserve_openvino.errors import (
    BusyError,
    InvalidInputError,
    ItemError,
    ModelLoadError,
    NotExplainedError,
)
from torchserve_openvino.generation.graph_calls import compile_parts
from torchserve_openvino.generation.images.loading import load, pipeline_folder
from torchserve_openvino.generation.images.pictures import PictureMaker, rehearse
from torchserve_openvino.serving.models import Models
from torchserve_openvino.serving.policy import admit
from torchserve_openvino.serving.requests.isolation import isolated
from torchserve_openvino.serving.requests.messages import EVENT_STREAM, Request, Response
from torchserve_openvino.serving.worker_context import WorkerContext
from torchserve_openvino.tasks.catalog import TASKS
from torchserve_openvino.tasks.items import NO_EXPLANATIONS, body
from torchserve_openvino.tasks.openai import LAST_EVENT, openai_error, unknown_path
from torchserve_openvino.tasks.pictures.picture_answers import PictureEvents, Pictures, entry_of, event, png, together
from torchserve_openvino.tasks.pictures.picture_parameters import (
    InputsRequest,
    PictureParameters,
    PromptRequest,
    read,
    read_openai,
)
from torchserve_openvino.tasks.pictures.request_limits import ImageRequest, PictureLimits
from torchserve_openvino.tasks.task_handler import TaskHandler

# What follows the model's path in a request's URL, in OpenAI's protocol; TorchServe passes it as a header.
_OPENAI = "v1/images/generations"
# Enough to run each graph; schedulers of higher order need two.
_REHEARSED_STEPS = 2


class ImageGenerator(TaskHandler):
    """Makes the pictures of each request, one after another.

    Attributes:
        maker: The pipeline.
        limits: What requests may ask.
    """

    # What the JSON schema is made of; see `HubHandler`.
    task: ClassVar[str] = "image_generator"
    parameters = PictureParameters
    takes: ClassVar[Any] = str
    answers: ClassVar[Any] = Pictures
    explanation_parameters = None
    explanations: ClassVar[Any] = None
    fields: ClassVar[frozenset[str]] = frozenset()
    request: ClassVar[Any] = PromptRequest | InputsRequest

    freezes = True
    reads_archive = True

    def __init__(self) -> None:
        super().__init__()
        self.maker: Any = None
        self.limits: Any = None
        self.folder = Path()

    # --- loading ----------------------------------------------------------------------------------------------

    def read_archive(self) -> None:
        """Loads the pipeline from the archive's folder."""
        self._check_section()
        self.folder = pipeline_folder(self._openvino.model_dir)
        self.maker = PictureMaker(load(self.folder))
        section = self._openvino.config.openvino
        sizes = self.maker.components.sizes(section.image_generation)
        self.limits = PictureLimits(section, self.maker, sizes)
        self.model = self.maker.components.denoiser
        self._most_items = section.image_generation.max_images

    def _check_section(self) -> None:
        """Refuses settings of other tasks, which would have no effect here."""
        section = self._openvino.config.openvino
        for key, is_set in {
            "warmup.inputs": bool(section.warmup.inputs),
            "warmup.samples": bool(section.warmup.samples),
            "warmup.batch_sizes": section.warmup.batch_sizes != "auto",
            "compile": bool(section.compile),
            "release_weights": section.release_weights,
        }.items():
            if is_set:
                raise ModelLoadError(
                    f"handler.openvino.{key} has no use here: image_generator knows its graphs and their inputs, and "
                    "they share weights."
                )

    def _prepare(self, context: WorkerContext) -> Models | None:
        """Compiles and verifies all graphs of the pipeline, and makes a picture of each size."""
        own = context.config.openvino.image_generation
        models: Models | None = None
        if context.config.pt2.enabled:
            parts = self.maker.components.parts(self.limits.sizes, own)
            models = compile_parts(parts, context)
            self._openvino.report = self._own_code.report = models.report
        else:
            super()._prepare(context)
        tracker = self._openvino.report.tracker
        for note in self.maker.notes:
            tracker.add_note(note)
        tracker.set_config("image_generation", self.limits.to_dict())
        start = time.perf_counter()
        rehearse(
            self.maker,
            self.limits.sizes,
            guided=self.limits.guidances,
            steps=min(_REHEARSED_STEPS, own.max_steps),
            images=own.image_to_image,
        )
        tracker.add_timing("rehearsal_seconds", time.perf_counter() - start)
        if models is not None:
            admit(self._openvino.report, self._openvino.config.openvino.fallback)
        return models

    def describe_handle(self) -> dict[str, Any]:
        """Returns the report, with the task, its limits and a JSON schema of its parameters."""
        about = TASKS[self.task]
        schema = self.parameters.model_json_schema()
        task = {"name": about.handler, "inputs": about.inputs, "outputs": about.outputs, "parameters": schema}
        limits = self.limits.to_dict() if self.limits is not None else {}
        return {**super().describe_handle(), "task": {**task, "limits": limits}}

    # --- requests ---------------------------------------------------------------------------------------------

    def _answered(self, items: list[Any], requests: Sequence[Request]) -> list[Any]:
        """Answers the items of a batch one after another, each with its own status."""
        start = time.perf_counter()
        self._openvino.counters.add("items", len(items))
        answers = [self._one(item, request) for item, request in zip(items, requests, strict=True)]
        self.record_time("HandlerTime", start)
        return answers

    def _one(self, item: Any, request: Request) -> Any:
        """Answers one item; an error in it is its own."""
        path = _path(request)
        events = PictureEvents(request, self._openvino.most_bytes)
        refused = isolated(lambda: self._checked(item, request, path, events))
        if not isinstance(refused, ItemError):
            return refused
        if events.begun:
            # The status is sent already, so the last event says what happened.
            self._openvino.counters.add(f"refused_{refused.status}")
            return Response(event("error", openai_error(refused)) + LAST_EVENT, EVENT_STREAM)
        if path == _OPENAI:
            refused.form = openai_error
        return refused

    def _checked(self, item: Any, request: Request, path: str, events: PictureEvents) -> Any:
        if request.explains:
            raise NotExplainedError(NO_EXPLANATIONS)
        if path not in {"", _OPENAI}:
            raise unknown_path(path, f"{_OPENAI}, and the model itself")
        plain = request.envelope is None
        reader = read_openai if path == _OPENAI else read
        prompt, parameters = reader(_sent(item, plain=plain), self.limits.max_bytes)
        wish = self.limits.validate(prompt, parameters)
        if wish.stream and not (plain and request.has_own_status):
            raise InvalidInputError("stream: true needs HTTP, without an envelope")
        as_png = wish.png and plain and path != _OPENAI
        return self.watched(lambda: self._made(wish, events, request.is_gone, as_png=as_png))

    def _made(self, wish: ImageRequest, events: PictureEvents, is_gone: Callable[[], bool], *, as_png: bool) -> Any:
        entries: list[dict[str, Any]] = []
        count = len(wish.seeds)
        for number, seed in enumerate(wish.seeds, 1):

            def on_step(step: int, steps: int, at: int = number) -> None:
                if is_gone():
                    # Others wait, and a picture takes minutes.
                    raise BusyError("the client hung up")
                if wish.stream:
                    events.progress(at, count, step, steps)

            data = png(self.maker.make(wish.settings, seed, on_step), seed)
            if as_png:
                return Response(data, "image/png")
            entries.append(entry_of(data, seed))
            if wish.stream and number < count:
                events.send(event("completed", entries[-1]))
        if wish.stream:
            return Response(events.check(event("completed", entries[-1]) + LAST_EVENT), EVENT_STREAM)
        return together(entries)


def _path(request: Request) -> str:
    """Returns the path below the model's URL; envelopes have none."""
    return request.path if request.envelope is None else ""


def _sent(item: Any, *, plain: bool) -> Any:
    """Returns what a request sent; in an envelope, an object is the request itself."""
    if not plain and isinstance(item, dict) and not item.keys() & {"data", "body"}:
        return item
    return body(item)
