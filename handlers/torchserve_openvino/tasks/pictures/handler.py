"""Generates pictures with a diffusers pipeline: a prompt in, PNG or JSON out."""

import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar

import torch

from torchserve_openvino.errors import (
    InvalidInputError,
    ItemError,
    ModelLoadError,
    NotExplainedError,
    PayloadTooLargeError,
)
from torchserve_openvino.generation.images.loading import load, pipeline_folder
from torchserve_openvino.generation.images.pictures import PictureMaker, rehearse
from torchserve_openvino.generation.parts import compile_parts
from torchserve_openvino.serving.context import WorkerContext
from torchserve_openvino.serving.models import Models
from torchserve_openvino.serving.policy import admit
from torchserve_openvino.serving.requests.batch_answer import explains, identified
from torchserve_openvino.serving.requests.isolation import server_fault
from torchserve_openvino.tasks.catalog import TASKS
from torchserve_openvino.tasks.handler import TaskHandler
from torchserve_openvino.tasks.items import NO_EXPLANATIONS, body
from torchserve_openvino.tasks.openai import LAST_EVENT, openai_error, path_of, unknown_path
from torchserve_openvino.tasks.pictures.answers import Events, Pictures, event, made, png, together
from torchserve_openvino.tasks.pictures.parameters import (
    InputsRequest,
    PictureParameters,
    PromptRequest,
    read,
    read_openai,
)
from torchserve_openvino.tasks.pictures.request_limits import ImageRequest, Limits

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

    def __init__(self) -> None:
        super().__init__()
        self.maker: Any = None
        self.limits: Any = None
        self.folder = Path()

    # --- loading ----------------------------------------------------------------------------------------------

    def initialize(self, context: Any) -> None:
        """Loads the pipeline from the archive's folder; no code in it runs."""
        self.context, self.manifest = context, context.manifest
        self.model_yaml_config = context.model_yaml_config or {}
        self.device, self.map_location = torch.device("cpu"), "cpu"
        self._check_section()
        self.folder = pipeline_folder(self._openvino.model_dir)
        self.maker = PictureMaker(load(self.folder))
        section = self._openvino.config.openvino
        sizes = self.maker.components.sizes(section.image_generation)
        self.limits = Limits(section, self.maker, sizes)
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

    def _answered(self, items: list[Any], context: Any, owners: Sequence[int] | None = None) -> list[Any]:
        """Answers the items of a batch one after another, each with its own status."""
        start = time.perf_counter()
        self._openvino.counters.add("items", len(items))
        places = range(len(items)) if owners is None else owners
        found = [
            self._one(item, context, place, plain=owners is None) for item, place in zip(items, places, strict=True)
        ]
        milliseconds = (time.perf_counter() - start) * 1e3
        context.metrics.add_time("HandlerTime", round(milliseconds, 2), None, "ms", dimensions=[])
        return found

    def _one(self, item: Any, context: Any, place: int, *, plain: bool) -> Any:
        """Answers one item; an error in it is its own.

        Args:
            item: The item.
            context: TorchServe's context.
            place: The request's place in the batch.
            plain: Whether the request is the item, and not an envelope around several.
        """
        path = path_of(context, place) if plain else ""
        events = Events(context, place)
        try:
            return self._checked(item, context, place, path, events, plain=plain)
        except ItemError as error:
            refused = error
        except MemoryError:
            refused = PayloadTooLargeError("this worker has not enough memory for this picture")
        except Exception as error:
            refused = server_fault(error)
        if events.begun:
            # The status is sent already, so the last event says what happened.
            self._openvino.counters.add(f"refused_{refused.status}")
            return event("error", openai_error(refused)) + LAST_EVENT
        if path == _OPENAI:
            self._openvino.counters.add(f"refused_{refused.status}")
            context.set_response_status(refused.status, HTTPStatus(refused.status).phrase, place)
            return identified(openai_error(refused), refused, context, place)
        return refused

    def _checked(self, item: Any, context: Any, place: int, path: str, events: Events, *, plain: bool) -> Any:
        if explains(context, place):
            raise NotExplainedError(NO_EXPLANATIONS)
        if path not in {"", _OPENAI}:
            raise unknown_path(path, f"{_OPENAI}, and the model itself")
        reader = read_openai if path == _OPENAI else read
        prompt, parameters = reader(_sent(item, plain=plain), self.limits.max_bytes)
        request = self.limits.validate(prompt, parameters)
        if request.stream and not (plain and context.get_request_header(place, "explain") is not None):
            raise InvalidInputError("stream: true needs HTTP, without an envelope")
        return self.watched(lambda: self._made(request, context, place, path, events, plain=plain))

    def _made(self, request: ImageRequest, context: Any, place: int, path: str, events: Events, *, plain: bool) -> Any:
        entries: list[dict[str, Any]] = []
        count = len(request.seeds)
        for number, seed in enumerate(request.seeds, 1):
            on_step = (
                (lambda step, steps, at=number: events.progress(at, count, step, steps)) if request.stream else None
            )
            data = png(self.maker.make(request.wanted, seed, on_step), seed)
            if request.png and plain and path != _OPENAI:
                context.set_response_content_type(place, "image/png")
                return data
            entries.append(made(data, seed))
            if request.stream and number < count:
                events.send(event("completed", entries[-1]))
        if request.stream:
            return events.check(event("completed", entries[-1]) + LAST_EVENT)
        return together(entries)


def _sent(item: Any, *, plain: bool) -> Any:
    """Returns what a request sent; in an envelope, an object is the request itself."""
    if not plain and isinstance(item, dict) and not item.keys() & {"data", "body"}:
        return item
    return body(item)
