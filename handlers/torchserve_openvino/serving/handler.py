"""`OpenVINOHandler`: what a TorchServe worker does from load to the last request, with OpenVINO underneath."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ts.torch_handler.base_handler import BaseHandler

from torchserve_openvino.backend import CompiledModule, compile
from torchserve_openvino.config import ResolvedOptions, ServingConfig, load_serving_config
from torchserve_openvino.config.sections import WarmupInput
from torchserve_openvino.errors import (
    ModelLoadError,
    PolicyViolationError,
    TorchServeOpenVINOError,
    VerificationError,
)
from torchserve_openvino.report import CompileReport, Tracker
from torchserve_openvino.serving import loading
from torchserve_openvino.serving.batching import BucketedModel, bucket_sizes
from torchserve_openvino.serving.metrics import MetricsEmitter
from torchserve_openvino.serving.policy import violations
from torchserve_openvino.serving.threads import threads_for
from torchserve_openvino.serving.verify import compare
from torchserve_openvino.serving.warmup import Inputs, make_inputs, warm_up

logger = logging.getLogger(__name__)


class OpenVINOHandler(BaseHandler):
    """A base for handlers, and a mixin for those that exist::

        class Mine(OpenVINOHandler, TheirHandler): ...

    keeps their preprocess, inference and postprocess, and serves their model on OpenVINO.

    Attributes:
        eager_model: The model as loaded.
        model: What answers requests: compiled, batches padded to compiled sizes.
        report: What ran where, and why.
        freezes: Whether calls run without guards after warm-up; only where nobody changes the model later.
    """

    freezes = False

    def __init__(self) -> None:
        super().__init__()
        self.config = ServingConfig()
        self.eager_model: Any = None
        self.report = CompileReport(Tracker())
        self._model_dir = Path()
        self._serialized: Path | None = None
        self._metrics: MetricsEmitter | None = None

    # --- loading ----------------------------------------------------------------------------------------------

    def initialize(self, context: Any) -> None:
        """Checks the configuration, loads, compiles, warms up, verifies; a READY worker has done all of it.

        Raises:
            RuntimeError: Anything that keeps the model from being served; TorchServe answers this class, and no
                other, as a failed load instead of a crashed worker. The cause has the precise class.
        """
        try:
            self._initialize(context)
        except TorchServeOpenVINOError as error:
            logger.error("%s is not served. %s: %s", context.model_name, type(error).__name__, error)
            if isinstance(error, RuntimeError):
                raise
            raise ModelLoadError(f"{type(error).__name__}: {error}") from error

    def _initialize(self, context: Any) -> None:
        self._model_dir = Path(context.system_properties.get("model_dir") or ".")
        self.config = self._load_config(context)
        threads = self._set_threads()
        start = time.perf_counter()
        with self._without_pt2(context):
            super().initialize(context)
        loaded = time.perf_counter() - start
        self.initialized = False
        self.eager_model = self.model
        batch_size = int(context.system_properties.get("batch_size") or 1)
        self._compile(threads, batch_size)
        self.report.add_timing("load_seconds", loaded)
        batches = self._warmup_batches(batch_size)
        if self.config.pt2.enabled and batches:
            self.report.add_timing("warmup_seconds", warm_up(self.model, batches))
            self._verify(batches)
            self._check_policy()
            if self.freezes:
                self._freeze(batches)
        self._metrics = MetricsEmitter(self.report)
        self._emit(context)
        logger.info("%s: %s", context.model_name, self._summary(bool(batches)))
        self.initialized = True

    def _load_config(self, context: Any) -> ServingConfig:
        """From the file where there is one, so that errors name the line."""
        manifest = context.manifest or {}
        name = manifest.get("model", {}).get("configFile")
        if name and (self._model_dir / name).is_file():
            return load_serving_config(self._model_dir / name)
        return load_serving_config(context.model_yaml_config or {})

    def _set_threads(self) -> int:
        workers = int(self.config.torchserve.get("maxWorkers", self.config.torchserve.get("minWorkers", 1)))
        threads = threads_for(self.config.openvino.threads, workers)
        torch.set_num_threads(threads)
        return threads

    @contextmanager
    def _without_pt2(self, context: Any) -> Iterator[None]:
        """Hides ``pt2`` (BaseHandler would compile lazily, and change the dict) and the weights' file type."""
        given_yaml, given_manifest = context.model_yaml_config, context.manifest
        model = dict((given_manifest or {}).get("model", {}))
        serialized = model.get("serializedFile")
        self._serialized = self._model_dir / serialized if serialized else None
        if not model.get("modelFile"):
            if self._serialized is None:
                raise ModelLoadError(
                    "the archive has neither a model file (--model-file) nor a model (--serialized-file)"
                )
            # BaseHandler knows one file type without a class, by its ending; `_load_torchscript_model` looks inside.
            model["serializedFile"] = "model.pt"
        context.model_yaml_config = {key: value for key, value in (given_yaml or {}).items() if key != "pt2"}
        context.manifest = {**(given_manifest or {}), "model": model}
        try:
            yield
        finally:
            context.model_yaml_config, context.manifest = given_yaml, given_manifest
            self.model_yaml_config, self.manifest = given_yaml, given_manifest
            self.model_pt_path = str(self._serialized) if self._serialized else None

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> torch.nn.Module:
        model = loading.load_class(Path(model_dir), model_file)
        if self._serialized is not None:
            loading.load_weights(model, self._serialized)
        return model

    def _load_torchscript_model(self, model_pt_path: str) -> torch.nn.Module:
        assert self._serialized is not None
        if not self.config.pt2.enabled and loading.archive_kind(self._serialized) == "torchscript":
            return torch.jit.load(self._serialized, map_location=self.device)
        return loading.load_without_class(self._serialized)

    # --- compilation ------------------------------------------------------------------------------------------

    def _compile(self, threads: int, batch_size: int) -> None:
        pt2, batching = self.config.pt2, self.config.openvino.batching
        if not pt2.enabled:
            tracker = Tracker()
            tracker.config.update(backend="none", effective_device="CPU", effective_precision="eager")
            tracker.add_note("pt2.compile.enable is false: the model runs in eager PyTorch")
            self.report = CompileReport(tracker)
            return
        dynamic = True if batching.mode == "dynamic" else pt2.dynamic
        compiled = compile(
            self.eager_model,
            dynamic=dynamic if dynamic is not None else False,
            options=pt2.options or None,
            fullgraph=pt2.fullgraph,
            mode=pt2.mode,
            backend=pt2.backend,
            resolved=self._with_threads(threads),
        )
        self.report = compiled.report
        pads = batching.mode == "bucket" and batch_size > 1
        self.model = BucketedModel(compiled, bucket_sizes(batching.buckets, batch_size)) if pads else compiled

    def _with_threads(self, threads: int) -> ResolvedOptions | None:
        """The backend's options with this worker's share of the cores, where the user named no number."""
        resolved = self.config.backend
        if resolved is None or "INFERENCE_NUM_THREADS" in resolved.options.config or resolved.options.device != "CPU":
            return resolved
        config = {**resolved.options.config, "INFERENCE_NUM_THREADS": threads}
        source = f"handler.openvino.threads: {self.config.openvino.threads}"
        return replace(
            resolved,
            options=resolved.options.model_copy(update={"config": config}),
            sources={**resolved.sources, "config.INFERENCE_NUM_THREADS": source},
        )

    def warmup_inputs(self) -> Sequence[WarmupInput]:
        """The model's inputs, one item each; a task that knows its own overrides this."""
        return self.config.openvino.warmup.inputs

    def _warmup_batches(self, batch_size: int) -> list[Inputs]:
        declared = self.warmup_inputs()
        if not declared:
            return []
        section = self.config.openvino
        sizes: Sequence[int]
        if section.warmup.batch_sizes != "auto":
            sizes = section.warmup.batch_sizes
        elif section.batching.mode == "exact":
            sizes = range(1, batch_size + 1)
        elif section.batching.mode == "dynamic":
            sizes = sorted({1, 2, batch_size})
        else:
            sizes = bucket_sizes(section.batching.buckets, batch_size)
        return [make_inputs(declared, size) for size in sizes]

    def _verify(self, batches: list[Inputs]) -> None:
        section = self.config.openvino.verify
        if section.against == "off" or self.eager_model.training:
            return
        precision = self.report.summary.precision or "f32"
        result = compare(self.model, self.eager_model, batches, precision=precision, max_abs=section.max_abs)
        self.report.set_verify(result)
        if not result["passed"]:
            message = (
                f"answers differ from eager PyTorch: max abs {result['max_abs']:.3g}, max rel {result['max_rel']:.3g}, "
                f"cosine {result['cosine']:.6f}; tolerance {result['tolerance']}. Set another "
                "INFERENCE_PRECISION_HINT, a larger handler.openvino.verify.max_abs, or on_violation: warn."
            )
            if section.on_violation == "refuse":
                raise VerificationError(message)
            logger.warning("Verification: %s", message)

    def _check_policy(self) -> None:
        policy = self.config.openvino.fallback
        found = violations(self.report, policy)
        if found and policy.on_violation == "refuse":
            raise PolicyViolationError("handler.openvino.fallback is not met: " + "; ".join(found))
        for sentence in found:
            logger.warning("handler.openvino.fallback: %s", sentence)

    def _freeze(self, batches: list[Inputs]) -> None:
        compiled = self.model.compiled if isinstance(self.model, BucketedModel) else self.model
        if isinstance(compiled, CompiledModule):
            compiled.freeze()
            # Two calls of each shape are recorded and compared; the requests to come are neither.
            warm_up(self.model, batches, rounds=2)

    def _summary(self, warmed: bool) -> str:
        if not self.config.pt2.enabled:
            return "eager PyTorch (pt2.compile.enable: false)"
        if not warmed:
            return "loaded; it compiles at the first request, unless handler.openvino.warmup.inputs are declared"
        return self.report.summary_line()

    # --- requests ---------------------------------------------------------------------------------------------

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """Answers a batch, then sends the metrics that changed."""
        self.context = context
        before = self.report.revision
        try:
            return self.answer(data, context)
        finally:
            if self.report.revision != before:
                logger.info("%s: %s", context.model_name, self.report.summary_line())
            self._emit(context)

    def answer(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """One answer for each item; tasks override this, a user's handler keeps its own three steps."""
        return super().handle(data, context)

    def describe_handle(self) -> dict[str, Any]:
        """The report, for ``GET /models/NAME?customized=true``."""
        model = getattr(self.context, "model_name", "")
        return {**self.report.to_dict(), "pid": os.getpid(), "model": model, "settings": self.config.summary}

    def _emit(self, context: Any) -> None:
        if self._metrics is not None and getattr(context, "metrics", None) is not None:
            self._metrics.emit(context.metrics)
