"""`OpenVINOHandler`: what a TorchServe worker does from load to the last request, with OpenVINO underneath."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchserve_openvino.cache.open import state_folder
from torchserve_openvino.config import ServingConfig, load_serving_config
from torchserve_openvino.config.sections.handler import WarmupInput
from torchserve_openvino.errors import ItemError, ModelLoadError, NotExplainedError
from torchserve_openvino.report import CompileReport, Tracker
from torchserve_openvino.report.progress import begin_step
from torchserve_openvino.serving.base import model_name
from torchserve_openvino.serving.loading.archive import facts_of, is_quantized
from torchserve_openvino.serving.loading.files import read_samples
from torchserve_openvino.serving.loading.model import ArchiveLoading
from torchserve_openvino.serving.loading.op_mappings import load_archived_mappings
from torchserve_openvino.serving.loading.wrapped import wrapped_class
from torchserve_openvino.serving.metrics import MetricsEmitter
from torchserve_openvino.serving.models import Models, prepare_models
from torchserve_openvino.serving.observation.load import observed_load, save_report
from torchserve_openvino.serving.observation.model_face import model_face
from torchserve_openvino.serving.observation.observe import ROOT, Call, Seen
from torchserve_openvino.serving.observation.own_code import OwnCode
from torchserve_openvino.serving.observation.parts import part_at
from torchserve_openvino.serving.policy import PolicyWatch, admit
from torchserve_openvino.serving.ready import ReadyState, shadow_for
from torchserve_openvino.serving.requests.batch_answer import answer_enveloped, finish
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.requests.envelopes import Envelope, take_over
from torchserve_openvino.serving.requests.isolation import only, run_isolated, server_fault
from torchserve_openvino.serving.served import ServedModel
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.shapes.plan import batch_sizes
from torchserve_openvino.serving.shapes.warmup import startup_advice
from torchserve_openvino.serving.siblings import Board, sibling_pids
from torchserve_openvino.serving.threads import ThreadPlan, plan_for
from torchserve_openvino.serving.versions.start import admit_versions

logger = logging.getLogger(__name__)


class OpenVINOHandler(ArchiveLoading):
    """A base for handlers, and a mixin for those that exist::

        class Mine(OpenVINOHandler, TheirHandler): ...

    keeps their preprocess, inference and postprocess, and serves their model on OpenVINO.

    Attributes:
        eager_model: The model as loaded.
        model: A stand-in that looks like the loaded model, but whose calls run compiled.
        served: Runs the calls of ``model``, padding batches to compiled sizes; None in eager PyTorch.
        report: What ran where, and why.
        freezes: Whether calls run without guards after warm-up; only safe if nothing changes the model later.
        wraps: Whether this class was made around a handler that the YAML names.
    """

    freezes = False
    wraps = False

    def __init__(self) -> None:
        super().__init__()
        self.eager_model: Any = None
        self.served: ServedModel | None = None
        self.report = CompileReport(Tracker())
        self.counters = Counters()
        self.state: ReadyState | None = None
        self._own_handle: Callable[..., Any] | None = None
        self._own_code = OwnCode(self)
        for name, step in self._own_code.watched_steps().items():
            setattr(self, name, step)
        # Wraps the `initialize` of a subclass, whether or not that calls ours.
        self.initialize = self._until_ready  # type: ignore[method-assign]
        # TorchServe wraps this handler in an envelope next, before it calls `initialize`.
        take_over()

    # --- loading ----------------------------------------------------------------------------------------------

    def initialize(self, context: Any) -> None:
        """Loads the model; a subclass may call this, and set up what else it needs before or after.

        TorchServe calls `_until_ready` instead, which runs this or a subclass's own, and then compiles ``self.model``.
        """
        with self.without_pt2(context):
            super().initialize(context)

    def _until_ready(self, context: Any) -> None:
        """Does all that a worker does before READY: checks the configuration, loads, compiles, warms up, verifies.

        Raises:
            RuntimeError: This package refuses to serve the model; if the error is of another class, the message names
                that class. TorchServe reports only a RuntimeError as a failed load instead of a crashed worker.
            Exception: Any other error, unchanged.
        """
        with observed_load(context):
            self._serve(context)

    def _serve(self, context: Any) -> None:
        start = time.perf_counter()
        self.model_dir = Path(context.system_properties.get("model_dir") or ".")
        load_archived_mappings(self.model_dir, context.model_yaml_config)
        self.config = self._load_config(context)
        if self.config.openvino.wrap is not None and not self.wraps:
            # TorchServe keeps this object's `handle`, so that it stays the same object and becomes one of their class.
            self.__class__ = wrapped_class(self.model_dir, self.config.openvino.wrap, OpenVINOHandler)
            type(self).__init__(self)
            self._serve(context)
            return
        begin_step("checking versions")
        news = admit_versions(lambda: state_folder(None))
        threads = plan_for(self.config, len(sibling_pids()))
        threads.apply()
        begin_step("loading the model")
        self.find_weights(context)
        type(self).initialize(self, context)
        loaded = time.perf_counter() - start
        self.initialized = False
        self.context = context
        self.eager_model = self.model_to_serve()
        begin_step("preparing")
        models = self._prepare(threads, int(context.system_properties.get("batch_size") or 1))
        if models is not None and models.needs_no_torch:
            threads = threads.settle()
        self.report.tracker.add_timing("load_seconds", loaded)
        self.report.tracker.set_config("threads", threads.to_dict())
        if is_quantized(self.model_dir):
            self.report.tracker.set_config("quantized", facts_of(self.model_dir))
        # TorchServe's default is 120 s.
        patience = int(self.config.torchserve.get("startupTimeout", 120))
        for note in filter(None, (news, startup_advice(time.perf_counter() - start, patience))):
            logger.warning("%s", note)
            self.report.tracker.add_note(note)
        watch = PolicyWatch(self.report, self.config.openvino.fallback)
        version = str((context.manifest or {}).get("model", {}).get("modelVersion") or "")
        metrics = MetricsEmitter(self.report, self.counters, version)
        self.counters.reset()
        verify = self.config.openvino.verify
        shadow = shadow_for(self.eager_model, verify, models, self.report, model_name(context))
        ends = verify.on_shadow_mismatch == "refuse"
        self.state = ReadyState(self.report, self.counters, watch, metrics, models, Board(self.model_dir), shadow, ends)
        self.state.post()
        self.state.emit(context)
        logger.info("%s: %s", model_name(context), self._summary(models))
        self.initialized = True
        save_report(context, self.describe_handle())

    def _load_config(self, context: Any) -> ServingConfig:
        """Reads the configuration, from its file where there is one, so that errors name the line."""
        manifest = context.manifest or {}
        name = manifest.get("model", {}).get("configFile")
        if name and (self.model_dir / name).is_file():
            return load_serving_config(self.model_dir / name)
        return load_serving_config(context.model_yaml_config or {})

    # --- compilation ------------------------------------------------------------------------------------------

    def _prepare(self, threads: ThreadPlan, batch_size: int) -> Models | None:
        """Compiles the model unless the YAML disables that; sets `model` and `report`."""
        if not self.config.pt2.enabled:
            self.model = self.eager_model
            tracker = Tracker()
            tracker.config.update(backend="none", effective_device="CPU", effective_precision="eager")
            tracker.add_note("pt2.compile.enable is false: the model runs in eager PyTorch")
            self.report = CompileReport(tracker)
            return None
        root, section = self.compilable(self.eager_model), self.config.openvino
        samples = read_samples(self.model_dir, section.warmup.samples)
        sizes = batch_sizes(section, batch_size, threads.streams)
        models = prepare_models(
            root,
            self._seen(samples, sizes),
            self.warmup_inputs(),
            learns=self._reads_samples,
            config=self.config,
            threads=threads,
            batch_size=batch_size,
            counters=self.counters,
            freezes=self.freezes,
            model_dir=self.model_dir,
            modes_for=self._own_code.modes_for,
            quantized=self.quantized,
        )
        self.report = self._own_code.report = models.report
        if self.report.tracker.config.get("precision_choice", {}).get("chosen") == "int8":
            self.eager_model = self.quantized
        if models.root is not None:
            self.served = models.root.model
            self.model = model_face(root, self.served)
        if not self._reads_samples:
            self._own_code.rehearse(samples, sizes, self._run_own)
        if models.ran or samples:
            admit(self.report, section.fallback)
        return models

    def _seen(self, samples: Sequence[tuple[str, bytes]], sizes: Sequence[int]) -> Seen:
        """Returns the calls that this handler makes for the samples."""
        parts = {path: part_at(self, path) for path in self.config.openvino.compile}
        if not self._reads_samples:
            return self._own_code.learn(samples, parts, sizes, self._run_own)
        return Seen({ROOT: [Call(name, self._read(name, body)) for name, body in samples]} if samples else {}, parts)

    @property
    def _reads_samples(self) -> bool:
        """Whether this is a task, which derives the inputs from a body itself; a user's own code has to be run."""
        return type(self).sample_inputs is not OpenVINOHandler.sample_inputs

    def warmup_inputs(self) -> Sequence[WarmupInput]:
        """Returns the model's declared inputs, one item each; a task that knows its own overrides this."""
        return self.config.openvino.warmup.inputs

    def _read(self, name: str, body: bytes) -> Inputs:
        try:
            return self.sample_inputs(body)
        except ItemError as error:
            raise ModelLoadError(f"the sample {name} is not a request that this handler accepts: {error}") from error

    def sample_inputs(self, body: bytes) -> Inputs:
        """Returns the model's inputs for one request's body, found by running the handler's code in eager PyTorch."""
        return self._own_code.inputs_for(body, self._run_own)

    def run_sample(self, body: bytes) -> Any:
        """Answers one request's body outside of any server, after the handler was loaded."""
        return self._own_code.run(self.handle, [{"body": body}], self.context)

    def _run_own(self, items: list[Any]) -> Any:
        return self._own_code.run(self._own_handle or super().handle, items, self.context)

    def _summary(self, models: Models | None) -> str:
        if models is None:
            return "eager PyTorch (pt2.compile.enable: false)"
        if not models.ran:
            return "loaded; the model compiles at the first request, as handler.openvino.warmup.inputs is not declared"
        return self.report.summary_line()

    # --- requests ---------------------------------------------------------------------------------------------

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """Answers a batch of requests, then sends the metrics that changed."""
        self.context = context
        if self._is_describe():
            return [self.describe_handle()]
        return self._accounted(context, lambda: finish(self._answered(data, context), context, self.counters))

    def handle_envelope(self, envelope: Envelope, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """Answers a batch of requests that came in one of TorchServe's envelopes."""
        self.context = context
        if self._is_describe():
            return [self.describe_handle()]

        def answer_items(items: list[Any], owners: Sequence[int]) -> list[Any]:
            return self._answered(items, context, owners)

        return self._accounted(context, lambda: answer_enveloped(envelope, data, context, answer_items, self.counters))

    def _accounted(self, context: Any, answer: Callable[[], list[Any]]) -> list[Any]:
        state = self.state
        assert state is not None
        state.before_call(context)
        self.counters.add("requests", len(getattr(context, "request_ids", None) or ()) or 1)
        try:
            return answer()
        finally:
            state.after_call(context)

    def _answered(self, items: list[Any], context: Any, owners: Sequence[int] | None = None) -> list[Any]:
        self.counters.add("items", len(items))
        return self.answer_items(items, context)

    def answer_items(self, items: list[Any], context: Any) -> list[Any]:
        """Returns an answer or `ItemError` for each item; tasks override this, a user's handler runs its own steps."""
        handle = self._own_handle or super().handle

        def run(some: list[tuple[int, Any]]) -> list[Any]:
            with only(context, [position for position, _ in some], len(items)):
                return self.watched(lambda: handle([item for _, item in some], context))

        return run_isolated(list(enumerate(items)), run, lambda _, error: server_fault(error), self.counters)

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any:
        """Runs TorchServe's explanations on the eager model: they hook into its layers and need gradients.

        Raises:
            NotExplainedError: The model is quantised, and has no gradients.
        """
        if is_quantized(self.model_dir):
            raise NotExplainedError("a quantised model has no gradients: explanations need the model in f32")
        served, self.model = self.model, self.eager_model
        try:
            with self._own_code.explaining():
                return super().explain_handle(data_preprocess, raw_data)
        finally:
            self.model = served

    def watched(self, run: Callable[[], Any]) -> Any:
        """Calls ``run``, returns its result, and checks what fell back against the policy.

        Raises:
            ForbiddenFallbackError: The call fell back in a way that the policy refuses.
        """
        result = self._own_code.watch(run)
        assert self.state is not None
        self.state.watch.check()
        return result

    def __setattr__(self, name: str, value: Any) -> None:
        # TorchServe's micro-batching assigns its own `handle`: it is kept, and called by the one of this class.
        object.__setattr__(self, "_own_handle" if name == "handle" else name, value)

    def describe_handle(self) -> dict[str, Any]:
        """Returns the report, for ``GET /models/NAME?customized=true``."""
        if self.state is not None:
            self.state.publish()
        serving = self.state.to_dict() if self.state is not None else {}
        own = {
            "serving": serving,
            "pid": os.getpid(),
            "model": model_name(self.context),
            "settings": self.config.summary,
            "workers": self.state.workers() if self.state is not None else [],
        }
        return {**self.report.to_dict(), **own}
