"""Compiles a model for serving: freezes it, warms it up, and wraps it in the `ServedModel` that takes requests."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend import CompiledModule, OpenAxes
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.cache.open import CacheSettings
from torchserve_openvino.config import ResolvedOptions, ServingConfig
from torchserve_openvino.report import CompileReport, Tracker
from torchserve_openvino.report.progress import begin_step, keep_report
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.requests.parallel_calls import ParallelCalls
from torchserve_openvino.serving.served import ServedModel
from torchserve_openvino.serving.shapes.input_spec import Signature
from torchserve_openvino.serving.shapes.plan import Shapes
from torchserve_openvino.serving.shapes.warmup import Case, warm_up
from torchserve_openvino.serving.verification.judge import Judge

if TYPE_CHECKING:
    from torchserve_openvino.backend.capture.whole import WholeCapture


@dataclass
class Prepared:
    """A model that is ready to serve.

    Attributes:
        model: Answers requests.
        report: What ran where, and why.
        cases: Calls that were run before READY; empty where nothing is known about the inputs.
        signatures: Compiled shapes.
        closed: Whether the same graphs serve no other shapes.
        judge: Judges answers as verification did; None where it compared nothing.
        memory: Memory before and after the eager weights were freed; empty where they were not.
    """

    model: ServedModel
    report: CompileReport
    cases: list[Case]
    signatures: list[Signature]
    closed: bool = False
    judge: Judge | None = None
    memory: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def needs_no_torch(self) -> bool:
        """Whether every declared call runs on OpenVINO only and without Dynamo, whose guards check torch's threads."""
        compiled, summary = self.model.compiled, self.report.summary
        covered = summary.graphs > 0 and summary.coverage == 1.0 and summary.fallbacks == 0
        frozen = isinstance(compiled, CompiledModule) and compiled.frozen >= len(self.signatures) > 0
        closed = self.closed or not any(graph.dynamic for graph in self.report.tracker.graphs)
        return covered and frozen and closed


class Compilation:
    """Compiles a model as often as needed: for serving, or for trials in other precisions and without the cache.

    Args:
        eager: The model.
        config: Its settings.
        shapes: The shapes to compile for.
        streams: Runs the parts of a batch.
        counters: Counts what happens to requests.
        freezes: Whether calls run without guards.
        packaged: Folder of compiled graphs that came with the archive; None uses none.
        proves: Whether answers of cached calls are compared with eager PyTorch's before use (`CacheSettings`).
        tracker: Records everything for the report; a new one if None.
    """

    def __init__(
        self,
        eager: Any,
        config: ServingConfig,
        shapes: Shapes,
        *,
        streams: ParallelCalls,
        counters: Counters,
        freezes: bool,
        packaged: Path | None,
        proves: bool,
        tracker: Tracker | None,
    ) -> None:
        self._eager, self._config, self._shapes = eager, config, shapes
        self._section = config.openvino
        self._streams, self._counters = streams, counters
        self._freezes, self._packaged, self._proves = freezes, packaged, proves
        self._tracker = tracker
        # Shared by all precisions.
        self._captures: dict[str, WholeCapture] = {}

    def make(
        self, resolved: ResolvedOptions | None, *, open_axes: OpenAxes | None = None, trial: Sequence[Case] = ()
    ) -> Prepared:
        """Compiles the model and warms it up.

        Args:
            resolved: The backend's options; None where a foreign backend compiles.
            open_axes: Axes whose sizes one graph leaves open.
            trial: The cases to compile for a trial, which neither uses the cache nor is recorded in the report. By
                default, all cases are compiled, to be served.
        """
        cached, cases = not trial, trial or self._shapes.cases
        begin_step("preparing the compiler")
        pt2, mode = self._config.pt2, self._section.batching.mode
        if resolved is not None and not cached:
            resolved = replace(resolved, options=replace(resolved.options, model_caching=False))
        dynamic = True if mode == "dynamic" or self._shapes.varies else pt2.dynamic
        if dynamic is None and pt2.is_openvino:
            dynamic = False
        spec = CompileSpec(
            dynamic=dynamic,
            options=pt2.options or None,
            fullgraph=pt2.fullgraph,
            mode=pt2.mode,
            backend=pt2.backend,
            resolved=resolved,
            own_weights=self._section.release_weights and self._freezes,
            cache=self.cache_settings() if cached else CacheSettings(),
            open_axes=open_axes,
            captures=self._captures,
        )
        compiled = compile_with(self._eager, spec, tracker=self._tracker if cached else None)
        if cached:
            keep_report(compiled.report)
        one = replace(spec, dynamic=True, own_weights=False, open_axes=None)
        make = partial(compile_with, self._eager, one, tracker=compiled.report.tracker)
        bounded = BoundedShapes(compiled, make, self._section.batching.max_shapes)
        if self._freezes and cases:
            # Before the first call, so that verification sees the calls that are served, and they may be cached.
            compiled.freeze()
        only = None
        if self._shapes.sizes is None and mode != "dynamic" and not dynamic:
            only = [signature.batch for signature in self._shapes.signatures]
        served = ServedModel(
            compiled,
            self._eager,
            inputs=self._shapes.inputs,
            compiles_outside=self._section.batching.outside == "compile",
            sizes=self._shapes.sizes,
            only_sizes=only,
            facts=self._shapes.facts,
            axes=self._shapes.axes,
            streams=self._streams,
            counters=self._counters,
            beyond=None if dynamic else bounded,
        )
        if cases:
            # Where one graph is to serve all shapes, none of them may be compiled anew.
            planned = nullcontext if dynamic or open_axes is not None else compiled.report.tracker.planned_compilation
            seconds = warm_up(served.run_exactly, served, cases, planned)
            compiled.report.tracker.add_timing("warmup_seconds", seconds)
        return Prepared(served, compiled.report, self._shapes.cases, self._shapes.signatures, open_axes is not None)

    def cache_settings(self) -> CacheSettings:
        """Returns the configured cache settings, with the entries that came in the archive."""
        section = self._section.cache
        settings = CacheSettings(
            limit_bytes=int(section.limit_gb * 1e9),
            lock_seconds=float(section.wait_seconds),
            packaged=self._packaged,
            proves=self._proves,
        )
        return settings.while_packaging(os.environ)


# --- A model that compiles each new shape, up to a limit; further shapes share one graph of symbolic sizes --------


logger = logging.getLogger(__name__)


class BoundedShapes:
    """A callable that replaces the model.

    Args:
        static: The model, compiled anew for each shape.
        make_dynamic: Makes the model compiled once for all shapes; called when it is first needed.
        limit: How many shapes `static` gets; `handler.openvino.batching.max_shapes`.
    """

    def __init__(self, static: Callable[..., Any], make_dynamic: Callable[[], Callable[..., Any]], limit: int) -> None:
        self._static, self._make_dynamic, self._limit = static, make_dynamic, limit
        self._known: set[Any] = set()
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call on the static model, or on the dynamic one if its shape is beyond the limit."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (spec, tuple((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else None for leaf in leaves))
        return (self._static if self._takes(key) else self._dynamic)(*args, **kwargs)

    def _takes(self, key: Any) -> bool:
        with self._lock:
            if key not in self._known and len(self._known) < self._limit:
                self._known.add(key)
            return key in self._known

    @cached_property
    def _dynamic(self) -> Callable[..., Any]:
        logger.warning(
            "More than %d shapes arrived (handler.openvino.batching.max_shapes): the others share one graph of "
            "symbolic sizes, which is compiled now. Declare lengths (batching.dims) or set batching.mode: dynamic.",
            self._limit,
        )
        return self._make_dynamic()
