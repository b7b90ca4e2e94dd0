"""Prepares a model before READY: compiles it for every declared shape in the chosen precision, and verifies it."""

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torchserve_openvino.backend import CompiledModule
from torchserve_openvino.backend.torchscript.python_form import identifiable
from torchserve_openvino.cache.identity.fingerprint import Fingerprint, fingerprint, mappings_digest
from torchserve_openvino.cache.open import PACKAGED_FOLDER, open_cache
from torchserve_openvino.config import ResolvedOptions
from torchserve_openvino.config.sections.openvino_section import WarmupInput
from torchserve_openvino.ops.mappings import registered
from torchserve_openvino.report.progress import begin_step
from torchserve_openvino.serving import precision, precision_trial, slower
from torchserve_openvino.serving.compilation import Compilation, Prepared
from torchserve_openvino.serving.memory import release_weights, tidy
from torchserve_openvino.serving.observation.observe import ObservedCall
from torchserve_openvino.serving.placement import Placement, stored_placement
from torchserve_openvino.serving.requests.batching import overhead
from torchserve_openvino.serving.requests.parallel_calls import ParallelCalls
from torchserve_openvino.serving.shapes import one_graph
from torchserve_openvino.serving.shapes.plan import Shapes, shapes_of
from torchserve_openvino.serving.shapes.warmup import Case, run_case
from torchserve_openvino.serving.stored_decision import StoredDecision
from torchserve_openvino.serving.verification import verify
from torchserve_openvino.serving.verification.admission import Admission
from torchserve_openvino.serving.verification.measures import Measure
from torchserve_openvino.serving.worker_context import WorkerContext

logger = logging.getLogger(__name__)


class _PrecisionFailed(Exception):
    """Answers of some shape in a chosen precision differ from eager PyTorch's."""


def probe_shapes(
    eager: Any, context: WorkerContext, *, declared: Sequence[WarmupInput], samples: Sequence[ObservedCall] = (),
    learns: bool = False,
) -> Shapes:  # fmt: skip
    """Decides what to compile a model for; runs it in eager PyTorch.

    Args:
        eager: The model.
        context: What the worker knows.
        declared: The model's inputs, one item each; empty where they are unknown.
        samples: Calls that the archive's sample requests make.
        learns: Whether samples define the inputs where nothing is declared; else every call is taken as it comes.
    """
    begin_step("probing the model in eager PyTorch")
    return shapes_of(
        eager, context.config.openvino, batch_size=context.batch_size, streams=context.threads.streams,
        declared=declared, samples=samples, learns=learns, modes_for=context.modes_for,
    )  # fmt: skip


class Preparation:
    """Compiles a model for serving.

    Args:
        eager: The model.
        context: What the worker knows.
        shapes: What to compile it for.
        part: Path of a module that the handler calls directly; empty for the model.
        quantized: The same in int8, for ``precision: auto`` to choose; None if there is none.
        measure: How the task judges a narrower precision; None if only numbers are compared.
        is_first: Whether this process has compiled no other model yet.
    """

    def __init__(
        self, eager: Any, context: WorkerContext, shapes: Shapes, *, part: str = "", quantized: Any = None,
        measure: Measure | None = None, is_first: bool = False,
    ) -> None:  # fmt: skip
        self._is_first = is_first
        self._eager, self._context, self._shapes, self._part = eager, context, shapes, part
        self._section = section = context.config.openvino
        self._freezes = context.freezes if section.freeze == "auto" else section.freeze
        self._admission = Admission(eager, section, shapes.cases, part, measure)
        self._compilation = Compilation(
            eager, context.config, shapes, streams=ParallelCalls(context.threads.streams), counters=context.counters,
            freezes=self._freezes, packaged=context.model_dir / PACKAGED_FOLDER if section.cache.packaged else None,
            # Verification compares every compiled shape with eager; no need to do so twice.
            proves=bool(self._admission.skipped), tracker=context.tracker,
        )  # fmt: skip
        begin_step("choosing what shapes share a graph")
        self._graph = one_graph.choose(eager, context.config, shapes, part)
        self._int8 = None if quantized is None else Preparation(quantized, context, shapes, part=part, measure=measure)

    # --- compilation ----------------------------------------------------------------------------------------

    def run(self) -> Prepared:
        """Compiles the model in the configured precision, warms it up, and verifies it.

        Raises:
            VerificationError: Answers differ from eager's, and ``verify.on_violation`` is ``refuse``; or they can't be
                compared, and ``verify.required`` is true.
        """
        self._admission.require()
        prepared = self._in_precision(self._with_threads())
        for note in self._shapes.notes:
            prepared.report.tracker.add_note(note)
        self._release(prepared)
        tidy(prepared.model.compiled, self._context.model_dir)
        return prepared

    def unasked(self, *, idle: bool = False) -> Prepared:
        """Prepares a model of which no inputs are known: it compiles at the first request that calls it.

        Args:
            idle: Whether samples call other modules instead, so that requests need not call it either.

        Raises:
            VerificationError: ``verify.required`` is true, and nothing can be compared.
        """
        if idle:
            return self._uncompared()
        self._admission.require()
        prepared = self._uncompared()
        self._admission.note_skipped(prepared.report, self._part or "self.model")
        return prepared

    def _uncompared(self) -> Prepared:
        resolved, requested = self._with_threads(), self._section.precision
        if resolved is None or not precision.is_open(resolved) or requested == "f32":
            return self._compilation.make(resolved)
        if requested != "auto":
            return self._compilation.make(
                precision.with_precision(resolved, requested, f"{precision.KEY}: {requested}")
            )
        prepared = self._compilation.make(resolved)
        prepared.report.tracker.add_note(
            f"{precision.KEY}: auto is f32 for {self._part or 'self.model'}: no call of it is known before READY, so "
            "that nothing can be compared or timed"
        )
        return prepared

    def _in_precision(self, resolved: ResolvedOptions | None) -> Prepared:
        """Compiles and verifies the model in the configured precision."""
        requested = self._section.precision
        if resolved is None or not precision.is_open(resolved):
            return self._admitted(resolved)
        if requested != "auto":
            source = "default" if requested == "f32" else f"{precision.KEY}: {requested}"
            return self._admitted(
                precision.with_precision(resolved, requested, source) if requested != "f32" else resolved
            )
        tried = precision.candidates(resolved)
        if self._int8 is not None:
            tried.insert(1, precision.INT8)
        if len(tried) < 2 or self._admission.skipped:
            why = self._admission.skipped or f"no precision is known to be faster than f32 on {resolved.options.device}"
            return self._chosen(resolved, {"chosen": "f32", "why": why, "tried": {}})
        settings = self._compilation.cache_settings()
        # Models that can't be told apart share no decision; the archive's own folder is this model's.
        shares = resolved.options.model_caching and self._is_identified
        store = open_cache(resolved.options.cache_dir if shares else None, settings)
        beside = fingerprint(self._int8._eager).weights if self._int8 is not None else ""
        bounds = self._admission.bounds
        folder = self._context.model_dir
        decisions = precision.stored_choice(
            store, folder, self._identity, resolved, self._arguments(), self._shapes.cases, beside, bounds
        )
        with decisions.lock():
            if (stored := decisions.load()) is not None:
                choice, decided = stored
                facts = {**choice.model_dump(), "decided": decided}
            else:
                eager_seconds = partial(run_case, self._eager, self._eager)
                facts = precision_trial.run(
                    [self._trial(name, resolved) for name in tried], self._shapes.cases, eager_seconds,
                    is_alone=self._is_first,
                )  # fmt: skip
                if not decisions.save(facts) and facts["chosen"] != "f32":
                    facts |= {
                        "chosen": "f32", "order": ["f32"],
                        "why": "the decision cannot be stored for the other workers",
                    }  # fmt: skip
        return self._chosen(resolved, facts, decisions)

    def _chosen(
        self,
        resolved: ResolvedOptions,
        facts: dict[str, Any],
        decisions: StoredDecision[precision.StoredChoice] | None = None,
    ) -> Prepared:
        """Compiles all shapes in the precision that `precision: auto` chose, or the next best where that one fails."""
        while True:
            of = self._candidate(name := facts["chosen"])
            graph = of._graph
            logger.info("Precision %s is served (%s: auto): %s", name, precision.KEY, facts)
            options = precision.with_precision(resolved, _hint(name), f"{precision.KEY}: auto")
            try:
                prepared = of._admitted(options, is_last=name == "f32")
            except _PrecisionFailed as failed:
                # It may have been compiled in separate graphs to no avail.
                of._graph = graph
                logger.warning("Precision %s is not served, because a shape fails verification: %s", name, failed)
                facts = precision.without(facts, name, str(failed))
                if decisions is not None:
                    decisions.save(facts)
                continue
            prepared.report.tracker.set_config("precision_choice", facts)
            return prepared

    def _admitted(self, resolved: ResolvedOptions | None, *, is_last: bool = True) -> Prepared:
        """Compiles the model, and compares it with eager PyTorch where that is possible.

        Raises:
            _PrecisionFailed: Answers differ, and another precision is left.
        """
        prepared = self._compilation.make(resolved, open_axes=self._graph.open_axes)
        if flaw := self._graph.flaw(prepared.report.summary):
            prepared = self._one_for_each(prepared, resolved, flaw)
        if self._admission.skipped:
            self._admission.note_skipped(prepared.report, type(self._eager).__name__)
        else:
            prepared = self._verified(prepared, resolved, is_last)
        stored = None if resolved is None else partial(self._placements, resolved)
        slower.fall_back_to_eager(prepared, self._section, self._admission.times, stored)
        self._time_calls(prepared)
        if self._shapes.inputs is not None:
            prepared.report.tracker.set_config("one_graph", self._graph.to_plain())
        return prepared

    def _time_calls(self, prepared: Prepared) -> None:
        """Sets what a call costs beside its rows, from the calls that verification made."""
        times = self._admission.times
        calls = [
            (signature, times[str(signature)].fastest) for signature in prepared.signatures if str(signature) in times
        ]
        prepared.model.overhead = overhead(
            [(signature.batch * math.prod(signature.dims.values()), seconds) for signature, seconds in calls]
        )

    @functools.cached_property
    def _identity(self) -> Fingerprint:
        """The eager model's fingerprint: large weights are read once for all decisions."""
        return fingerprint(identifiable(self._eager))

    @property
    def _is_identified(self) -> bool:
        """Whether the model and the user's mappings can be told from others."""
        return not self._identity.unknown and not self._mappings[1]

    @functools.cached_property
    def _mappings(self) -> tuple[str, tuple[str, ...]]:
        """The digest of the user's mappings, and what it does not tell; libraries are read for it."""
        return mappings_digest(registered())

    def _arguments(self) -> dict[str, Any]:
        """Returns how the model is captured and converted, and which sizes graphs leave open, JSON-safe."""
        pt2, axes = self._context.config.pt2, self._graph.open_axes
        return {
            "backend": pt2.backend, "dynamic": pt2.dynamic, "batching": self._section.batching.mode,
            "open_axes": axes.to_plain() if axes is not None else None, "mappings": self._mappings[0],
        }  # fmt: skip

    def _placements(
        self, resolved: ResolvedOptions, compiled: CompiledModule, cases: Sequence[Case], may_leave: bool
    ) -> StoredDecision[Placement] | None:
        """Opens what was decided before on where partitions and calls run; None where nothing is stored."""
        directory = resolved.options.cache_dir if resolved.options.model_caching else None
        store = open_cache(directory, self._compilation.cache_settings())
        if store is None or not self._is_identified:
            return None
        return stored_placement(store, self._identity, compiled, resolved, self._arguments(), cases, may_leave)

    def _one_for_each(self, prepared: Prepared, resolved: ResolvedOptions | None, flaw: str) -> Prepared:
        """Compiles the model again, with one graph for each shape, because fewer graphs have a flaw."""
        logger.warning("Compiling one graph for each shape: with fewer graphs, %s", flaw)
        self._graph = one_graph.GraphChoice(f"with fewer graphs {flaw}")
        if isinstance(prepared.model.compiled, CompiledModule):
            prepared.model.compiled.drop()
        return self._compilation.make(resolved)

    def _verified(self, prepared: Prepared, resolved: ResolvedOptions | None, is_last: bool) -> Prepared:
        """Compares the model's answers with eager PyTorch's; compiles it again if wrong ones came from the cache."""
        result = self._admission.compare(prepared.model, prepared.report)
        compiled = prepared.model.compiled
        if not result["passed"] and isinstance(compiled, CompiledModule) and compiled.reject_cached():
            problem = verify.failure(result)
            logger.warning("Answers from the cache differ from eager's, compiling again: %s", problem)
            prepared = self._compilation.make(resolved, open_axes=self._graph.open_axes)
            prepared.report.tracker.add_note(f"entries of the cache were rejected: {problem}")
            result = self._admission.compare(prepared.model, prepared.report)
        if not result["passed"] and self._graph.limit:
            prepared = self._one_for_each(prepared, resolved, verify.failure(result))
            result = self._admission.compare(prepared.model, prepared.report)
        if not result["passed"] and not is_last:
            if isinstance(prepared.model.compiled, CompiledModule):
                prepared.model.compiled.drop()
            raise _PrecisionFailed(verify.failure(result))
        if isinstance(prepared.model.compiled, CompiledModule):
            prepared.model.compiled.confirm_cached()
        self._admission.judge(prepared.report, result)
        prepared.judge = self._admission.judge_in(prepared.report.summary.precision or "f32")
        return prepared

    def _with_threads(self) -> ResolvedOptions | None:
        """Returns the backend's options, with this worker's share of the cores where the user set no number."""
        resolved, added = self._context.config.backend, self._context.threads.ov_config()
        if resolved is None or not added:
            return resolved
        origins = self._context.threads.sources
        reasons = {"NUM_STREAMS": origins["streams"], "ENABLE_CPU_PINNING": "several workers share the cores"}
        sources = {f"config.{name}": reasons.get(name, origins["openvino_threads"]) for name in added}
        config = {**resolved.options.config, **added}
        return replace(
            resolved,
            options=replace(resolved.options, config=config),
            sources={**resolved.sources, **sources},
        )

    def _candidate(self, name: str) -> "Preparation":
        """Returns what prepares the model for a precision."""
        return self._int8 if self._int8 is not None and name == precision.INT8 else self

    def _trial(self, name: str, resolved: ResolvedOptions) -> precision_trial.PrecisionCandidate:
        """Returns how a precision is tried."""
        options, of = precision.with_precision(resolved, _hint(name), f"{precision.KEY}: auto"), self._candidate(name)
        return precision_trial.PrecisionCandidate(
            name,
            lambda cases: of._compilation.make(options, open_axes=of._graph.open_axes, trial=cases),
            lambda prepared, cases: of._admission.compare(prepared.model, prepared.report, name, cases),
        )

    def _release(self, prepared: Prepared) -> None:
        compiled = prepared.model.compiled
        if not self._section.release_weights:
            return
        if self._freezes and self._shapes.cases and isinstance(compiled, CompiledModule):
            prepared.memory = release_weights(compiled, self._shapes.cases, prepared.report)
        else:
            note = "release_weights has no effect: calls are not frozen (handler.openvino.freeze, warmup.inputs)"
            logger.warning("%s", note)
            prepared.report.tracker.add_note(note)


def _hint(name: str) -> str:
    """Returns the precision of what a candidate computes in floats."""
    return "f32" if name == precision.INT8 else name
