"""`Worker`: what a TorchServe worker does from load to the last request, with OpenVINO underneath."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchserve_openvino.cache.open import PRECOMPILE_ENV, state_folder
from torchserve_openvino.config import ServingConfig, load_serving_config
from torchserve_openvino.config.sections.openvino_section import WarmupInput
from torchserve_openvino.errors import ItemError, ModelLoadError
from torchserve_openvino.report import CompileReport, Tracker
from torchserve_openvino.report.progress import begin_step
from torchserve_openvino.serving.loading.archive_manifest import facts_of, is_quantized
from torchserve_openvino.serving.loading.files import read_samples
from torchserve_openvino.serving.loading.op_mappings import load_archived_mappings
from torchserve_openvino.serving.metrics import MetricsEmitter
from torchserve_openvino.serving.models import Models, RootModel, prepare_models
from torchserve_openvino.serving.observation.load import observed_load, save_report
from torchserve_openvino.serving.observation.observe import ROOT, ObservedCall, Seen, model_face
from torchserve_openvino.serving.observation.parts import part_at
from torchserve_openvino.serving.policy import PolicyWatch, admit
from torchserve_openvino.serving.ready import ReadyState, shadow_for
from torchserve_openvino.serving.requests.recording import Recorder
from torchserve_openvino.serving.requests.tracing import Tracing
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.shapes.plan import batch_sizes
from torchserve_openvino.serving.shapes.warmup import startup_advice
from torchserve_openvino.serving.siblings import Board, sibling_pids
from torchserve_openvino.serving.threads import ThreadPlan, plan_for
from torchserve_openvino.serving.torchserve.base import model_name
from torchserve_openvino.serving.verification.health import Health
from torchserve_openvino.serving.verification.measures import Measure
from torchserve_openvino.serving.versions.start import admit_versions
from torchserve_openvino.serving.worker.answering import Answering
from torchserve_openvino.serving.worker_context import MethodCompiler, WorkerContext

logger = logging.getLogger(__name__)


class Worker(Answering):
    """Serves the model of one handler.

    It is kept in one private attribute of the handler, whose other attributes all belong to the user.

    Args:
        handler: An object with the steps of TorchServe's BaseHandler.
        mixin: The class in the handler's method resolution order behind which its own `handle` is looked up.
        replaces: Makes the handler one of the class that ``handler.openvino.wrap`` names; None if it is one already.
    """

    is_task = False

    def __init__(self, handler: Any, mixin: Any, replaces: Callable[[Path, str], None] | None = None) -> None:
        super().__init__(handler, mixin)
        self._replaces = replaces

    @property
    def method_compilers(self) -> tuple[MethodCompiler, ...]:
        """What compiles some methods that the YAML names in another way than as one graph."""
        return type(self.handler)._openvino_method_compilers

    # --- what a shipped task does in another way -----------------------------------------------------------------

    @property
    def freezes(self) -> bool:
        """Whether calls run without guards after warm-up; only safe if nothing changes the model later."""
        return False

    @property
    def reads_samples(self) -> bool:
        """Whether this is a task, which derives the inputs from a body itself; a user's own code has to be run."""
        return False

    def warmup_inputs(self) -> Sequence[WarmupInput]:
        """Returns the model's declared inputs, one item each."""
        return self.config.openvino.warmup.inputs

    def sample_inputs(self, body: bytes) -> Inputs:
        """Returns the model's inputs for one request's body, found by running the handler's code in eager PyTorch."""
        return self.own_code.inputs_for(body, self.run_own)

    @property
    def measure(self) -> Measure | None:
        """How a narrower precision is judged; None if nothing but numbers is known of the model's outputs."""
        return None

    def prepare(self, context: WorkerContext) -> Models | None:
        """Compiles the model unless the YAML disables that; sets the handler's `model`, and `report`."""
        if not self.config.pt2.enabled:
            self.handler.model = self.eager_model
            tracker = Tracker()
            tracker.config.update(backend="none", effective_device="CPU", effective_precision="eager")
            tracker.add_note("pt2.compile.enable is false: the model runs in eager PyTorch")
            if "precision" in self.config.openvino.model_fields_set:
                tracker.add_note("handler.openvino.precision has no effect: pt2.compile.enable is false")
            self.report = CompileReport(tracker)
            return None
        section = self.config.openvino
        root = RootModel(
            self.compilable(self.eager_model), self.warmup_inputs(), self.reads_samples, self.quantized, self.measure
        )
        samples = read_samples(self.model_dir, section.warmup.samples)
        sizes = batch_sizes(section, context.batch_size, context.threads.streams)
        models = prepare_models(root, self.seen(samples, sizes), context, self.method_compilers)
        self.report = self.own_code.report = models.report
        if self.report.tracker.config.get("precision_choice", {}).get("chosen") == "int8":
            self.eager_model = self.quantized
        if models.root is not None:
            self.served = models.root.model
            self.handler.model = model_face(root.eager, self.served)
        if not self.reads_samples:
            self.own_code.rehearse(samples, sizes, self.run_own)
        if models.ran or samples:
            admit(self.report, section.fallback)
        return models

    def seen(self, samples: Sequence[tuple[str, bytes]], sizes: Sequence[int]) -> Seen:
        """Returns the calls that the handler makes for the samples."""
        parts = {path: part_at(self.handler, path) for path in self.config.openvino.compile}
        if not self.reads_samples:
            return self.own_code.learn(samples, parts, sizes, self.run_own)
        return Seen(
            {ROOT: [ObservedCall(name, self._read(name, body)) for name, body in samples]} if samples else {}, parts
        )

    def summary(self, models: Models | None) -> str:
        """Returns what is logged at READY."""
        if models is None:
            return "eager PyTorch (pt2.compile.enable: false)"
        if not models.ran:
            return "loaded; the model compiles at the first request, as handler.openvino.warmup.inputs is not declared"
        return self.report.summary_line()

    def started(self) -> None:
        """Does what has to be done once the worker is READY."""

    # --- loading --------------------------------------------------------------------------------------------------

    def until_ready(self, context: Any) -> None:
        """Does all that a worker does before READY: checks the configuration, loads, compiles, warms up, verifies.

        TorchServe calls it as the handler's `initialize`.

        Raises:
            RuntimeError: This package refuses to serve the model; if the error is of another class, the message names
                that class. TorchServe reports only a RuntimeError as a failed load instead of a crashed worker.
            Exception: Any other error, unchanged.
        """
        with observed_load(context):
            self.serve(context)
        # By now another worker may be the handler's (`handler.openvino.wrap`).
        self.handler._openvino.started()

    def serve(self, context: Any) -> None:
        """Loads the model, and brings it to READY."""
        start = time.perf_counter()
        self.model_dir = Path(context.system_properties.get("model_dir") or ".")
        self.model_name = model_name(context)
        self.model_version = str((context.manifest or {}).get("model", {}).get("modelVersion") or "")
        self.most_requests = int(context.system_properties.get("batch_size") or 1)
        load_archived_mappings(self.model_dir, context.model_yaml_config)
        self.config = self._load_config(context)
        if self.config.openvino.wrap is not None and self._replaces is not None:
            self._replaces(self.model_dir, self.config.openvino.wrap)
            return self.handler._openvino.serve(context)
        begin_step("checking versions")
        news = admit_versions(lambda: state_folder(None))
        threads = plan_for(self.config, len(sibling_pids()), getattr(context, "workers", None))
        threads.apply()
        begin_step("loading the model")
        self.find_weights(context)
        initialize = self.overrides.get("initialize")
        initialize(context) if initialize is not None else type(self.handler).initialize(self.handler, context)
        loaded = time.perf_counter() - start
        self.handler.initialized = False
        self.handler.context = context
        self.eager_model = self.model_to_serve()
        begin_step("preparing")
        models = self.prepare(self._context_with(threads))
        if models is not None and models.needs_no_torch:
            threads = threads.settle()
        self.report.tracker.add_timing("load_seconds", loaded)
        self.report.tracker.set_config("threads", threads.to_dict())
        if is_quantized(self.model_dir):
            self.report.tracker.set_config("quantized", facts_of(self.model_dir))
        # TorchServe's default is 120 s.
        patience = int(self.config.torchserve.get("startupTimeout", 120))
        for note in filter(
            None, (news, self._why_kept(context), startup_advice(time.perf_counter() - start, patience))
        ):
            logger.warning("%s", note)
            self.report.tracker.add_note(note)
        if self.config.openvino.record.folder is not None and PRECOMPILE_ENV not in os.environ:
            self.recorder = Recorder(self.config.openvino.record, self.model_dir)
        self.state = self._ready(models)
        self.state.post()
        self.state.emit(self.metrics)
        logger.info("%s: %s", self.model_name, self.summary(models))
        self.handler.initialized = True
        save_report(context, self.describe())
        return None

    def _context_with(self, threads: ThreadPlan) -> WorkerContext:
        return WorkerContext(
            config=self.config, model_dir=self.model_dir, threads=threads, batch_size=self.most_requests,
            counters=self.counters, freezes=self.freezes, modes_for=self.own_code.modes_for,
        )  # fmt: skip

    def _why_kept(self, context: Any) -> str:
        """Returns a note if the host does not let idle workers end, though the YAML wants it; empty otherwise."""
        if self.config.openvino.keep is None or not getattr(context, "keeps_idle", True):
            return ""
        return (
            "handler.openvino.keep has no effect: this host starts a worker again as soon as it ends, and cannot hold "
            "a request back until one is ready. `torchserve-openvino serve` can."
        )

    def _ready(self, models: Models | None) -> ReadyState:
        watch = PolicyWatch(self.report, self.config.openvino.fallback)
        metrics = MetricsEmitter(self.report, self.counters, self.model_version, self.times)
        self.health = Health(self.report, models, self.eager_model, self.config.openvino.verify, watch)
        self.counters.reset()
        self.times.reset()
        if self.config.openvino.tracing:
            self.tracing = Tracing(self.model_name, self.model_version)
        verify = self.config.openvino.verify
        shadow = shadow_for(self.eager_model, verify, models, self.report, self.model_name)
        ends = verify.on_shadow_mismatch == "refuse"
        return ReadyState(
            self.model_name, self.report, self.counters, watch, metrics, models, Board(self.model_dir), shadow, ends,
            self.times,
        )  # fmt: skip

    def _load_config(self, context: Any) -> ServingConfig:
        """Reads the configuration, from its file where there is one, so that errors name the line."""
        manifest = context.manifest or {}
        name = manifest.get("model", {}).get("configFile")
        if name and (self.model_dir / name).is_file():
            return load_serving_config(self.model_dir / name)
        return load_serving_config(context.model_yaml_config or {})

    def _read(self, name: str, body: bytes) -> Inputs:
        try:
            return self.sample_inputs(body)
        except ItemError as error:
            raise ModelLoadError(f"the sample {name} is not a request that this handler accepts: {error}") from error
