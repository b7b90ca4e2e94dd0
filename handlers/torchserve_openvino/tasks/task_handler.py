"""`TaskHandler`: the base of the shipped tasks, which take part in what their worker does."""

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from torchserve_openvino.config.sections.openvino_section import WarmupInput
from torchserve_openvino.generation.method_compiler import METHOD_COMPILERS
from torchserve_openvino.serving.models import Models
from torchserve_openvino.serving.observation.observe import Seen
from torchserve_openvino.serving.requests.messages import Request, Response
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.torchserve.handler_base import HandlerBase
from torchserve_openvino.serving.verification.measures import Measure
from torchserve_openvino.serving.worker.worker import Worker
from torchserve_openvino.serving.worker_context import WorkerContext


class TaskWorker(Worker):
    """The worker of a shipped task: asks the task for what tasks do in different ways."""

    is_task = True

    @property
    def freezes(self) -> bool:
        """Whether the task's model stays as it was loaded."""
        return bool(type(self.handler).freezes)

    @property
    def most_items(self) -> int | None:
        """The most items in one enveloped request, since all are decoded before any is answered."""
        return self.handler._most_items

    @property
    def reads_samples(self) -> bool:
        """Whether the task derives the model's inputs from a body."""
        return type(self.handler).sample_inputs is not TaskHandler.sample_inputs

    @property
    def measure(self) -> Measure | None:
        """The task's measure."""
        return self.handler.measure()

    def warmup_inputs(self) -> Sequence[WarmupInput]:
        """Returns the task's declared inputs."""
        return self.handler.warmup_inputs()

    def sample_inputs(self, body: bytes) -> Inputs:
        """Returns the model's inputs for a body, as the task reads it."""
        return self.handler.sample_inputs(body)

    def servable(self, model: Any) -> Any:
        """Returns the module to compile, which a task may wrap."""
        return self.handler.servable(model)

    def started(self) -> None:
        """Lets the task do what follows READY."""
        self.handler._started()

    def prepare(self, context: WorkerContext) -> Models | None:
        """Compiles the task's models."""
        return self.handler._prepare(context)

    def seen(self, samples: Sequence[tuple[str, bytes]], sizes: Sequence[int]) -> Seen:
        """Returns the calls that the task makes for samples."""
        return self.handler._seen(samples, sizes)

    def summary(self, models: Models | None) -> str:
        """Returns what is logged at READY."""
        return self.handler._summary(models)

    def responses(self, requests: Sequence[Request]) -> list[Response]:
        """Returns the task's responses."""
        return self.handler._responses(requests)

    def answered(self, items: list[Any], requests: Sequence[Request]) -> list[Any]:
        """Returns the task's answers."""
        return self.handler._answered(items, requests)


class _OfWorker:
    """An attribute of a task that its worker keeps. It is read only: `self.config` is `self._openvino.config`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, task: Any, kind: type) -> Any:
        return self if task is None else getattr(task._openvino, self._name)


class TaskHandler(HandlerBase):
    """A handler of this package: its methods are steps of its worker, and it reads its worker's state.

    Attributes:
        config: The settings.
        counters: Counts of what happened to requests.
        eager_model: The model as loaded, or what `servable` made of it.
        loaded: The model as loaded.
        model_dir: Where the archive was unpacked.
        report: What ran where, and why.
        served: Runs the model's calls; None in eager PyTorch.
        state: The worker's state after READY.
        freezes: Whether calls run without guards after warm-up; only safe if nothing changes the model later.
        reads_archive: Whether `read_archive` loads the model, and not BaseHandler.
        needs_f32: Whether it computes with the weights in f32 beside a quantized model.
    """

    _openvino_worker: ClassVar[type[Worker]] = TaskWorker
    # For a handler that `handler.openvino.wrap` names.
    _openvino_method_compilers = METHOD_COMPILERS
    freezes = False
    reads_archive: ClassVar[bool] = False
    needs_f32: ClassVar[bool] = False
    # The most items in one enveloped request, all of which are decoded before any is answered; None sets no limit.
    _most_items: int | None = None

    config: Any = _OfWorker("config")
    counters: Any = _OfWorker("counters")
    eager_model: Any = _OfWorker("eager_model")
    loaded: Any = _OfWorker("loaded")
    model_dir: Any = _OfWorker("model_dir")
    report: Any = _OfWorker("report")
    served: Any = _OfWorker("served")
    state: Any = _OfWorker("state")
    _own_code: Any = _OfWorker("own_code")

    def initialize(self, context: Any) -> None:
        """Loads the model, on the CPU."""
        if not self.reads_archive:
            super().initialize(context)
            return
        self.context, self.manifest = context, context.manifest
        self.model_yaml_config = context.model_yaml_config or {}
        self.device, self.map_location = torch.device("cpu"), "cpu"
        self.read_archive()

    def read_archive(self) -> None:
        """Sets `model`, and what else the task needs, from the archive's files; no code in it runs."""
        raise NotImplementedError

    def warmup_inputs(self) -> Sequence[WarmupInput]:
        """Returns the model's declared inputs, one item each; a task that knows its own overrides this."""
        return Worker.warmup_inputs(self._openvino)

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet; None if only their numbers are compared."""
        return None

    def sample_inputs(self, body: bytes) -> Inputs:
        """Returns the model's inputs for one request's body."""
        return Worker.sample_inputs(self._openvino, body)

    def servable(self, model: Any) -> Any:
        """Returns the module to compile for a loaded model; a task may wrap it. Eager comparisons use it as well."""
        return Worker.servable(self._openvino, model)

    def answer_items(self, items: list[Any]) -> list[Any]:
        """Returns an answer or `ItemError` for each item; a task overrides this, or `_answered`."""
        raise NotImplementedError

    def run_sample(self, body: bytes) -> Any:
        """Answers one request's body outside of any server, after the handler was loaded."""
        return self._openvino.run_sample(body)

    def watched(self, run: Callable[..., Any], *args: Any) -> Any:
        """Calls ``run``, returns its result, and checks what fell back against the policy."""
        return self._openvino.watched(run, *args)

    def _started(self) -> None:
        """Does what has to be done once the worker is READY."""

    def _prepare(self, context: WorkerContext) -> Models | None:
        return Worker.prepare(self._openvino, context)

    def _seen(self, samples: Sequence[tuple[str, bytes]], sizes: Sequence[int]) -> Seen:
        return Worker.seen(self._openvino, samples, sizes)

    def _summary(self, models: Models | None) -> str:
        return Worker.summary(self._openvino, models)

    def _responses(self, requests: Sequence[Request]) -> list[Response]:
        return Worker.responses(self._openvino, requests)

    def _answered(self, items: list[Any], requests: Sequence[Request]) -> list[Any]:
        """Returns an answer, a whole `Response` or an `ItemError` for each item; see `Worker.answered`."""
        self._openvino.counters.add("items", len(items))
        return self.answer_items(items)

    def record_time(self, name: str, start: float) -> None:
        """Records a metric of TorchServe's: the milliseconds since ``start``, by `time.perf_counter`."""
        if (metrics := self._openvino.metrics) is not None:
            metrics.record("gauge", name, round((time.perf_counter() - start) * 1e3, 3), {}, "ms")
