"""Prepares a model before READY: compiles it for every declared shape in the chosen precision, and verifies it."""

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchserve_openvino.backend import CompiledModule
from torchserve_openvino.backend.runtime.compare import output_tensors
from torchserve_openvino.cache.identity.fingerprint import fingerprint
from torchserve_openvino.cache.open import PACKAGED_FOLDER, open_cache
from torchserve_openvino.config import ResolvedOptions
from torchserve_openvino.config.sections.handler import WarmupInput
from torchserve_openvino.report.progress import begin_step
from torchserve_openvino.serving import precision
from torchserve_openvino.serving.compilation import Compilation, Prepared
from torchserve_openvino.serving.context import WorkerContext
from torchserve_openvino.serving.memory import release_weights, tidy
from torchserve_openvino.serving.observation.observe import Call
from torchserve_openvino.serving.requests.streams import Streams
from torchserve_openvino.serving.shapes import one_graph
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.shapes.plan import Shapes, shapes_of
from torchserve_openvino.serving.shapes.warmup import run_case
from torchserve_openvino.serving.verification import verify
from torchserve_openvino.serving.verification.admission import Admission
from torchserve_openvino.serving.verification.measures import Measure

logger = logging.getLogger(__name__)


def probe_shapes(
    eager: Any, context: WorkerContext, *, declared: Sequence[WarmupInput], samples: Sequence[Call] = (),
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
    """

    def __init__(
        self, eager: Any, context: WorkerContext, shapes: Shapes, *, part: str = "", quantized: Any = None,
        measure: Measure | None = None,
    ) -> None:  # fmt: skip
        self._eager, self._context, self._shapes, self._part = eager, context, shapes, part
        self._section = section = context.config.openvino
        self._freezes = context.freezes if section.freeze == "auto" else section.freeze
        self._admission = Admission(eager, section, shapes.cases, part, measure)
        self._compilation = Compilation(
            eager, context.config, shapes, streams=Streams(context.threads.streams), counters=context.counters,
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
        tidy(prepared.model.compiled)
        return prepared

    def unasked(self) -> Prepared:
        """Prepares a model of which no inputs are known: it compiles at the first request that calls it."""
        resolved, wanted = self._with_threads(), self._section.precision
        if resolved is None or not precision.is_open(resolved) or wanted == "f32":
            return self._compilation.make(resolved)
        if wanted != "auto":
            return self._compilation.make(precision.with_precision(resolved, wanted, f"{precision.KEY}: {wanted}"))
        prepared = self._compilation.make(resolved)
        prepared.report.tracker.add_note(
            f"{precision.KEY}: auto is f32 for {self._part or 'self.model'}: no call of it is known before READY, so "
            "that nothing can be compared or timed"
        )
        return prepared

    def _in_precision(self, resolved: ResolvedOptions | None) -> Prepared:
        """Compiles and verifies the model in the configured precision."""
        wanted = self._section.precision
        if resolved is None or not precision.is_open(resolved):
            return self._admitted(resolved)
        if wanted != "auto":
            source = "default" if wanted == "f32" else f"{precision.KEY}: {wanted}"
            return self._admitted(precision.with_precision(resolved, wanted, source) if wanted != "f32" else resolved)
        tried = precision.candidates(resolved) + ([precision.INT8] if self._int8 is not None else [])
        if len(tried) < 2 or self._admission.skipped:
            why = self._admission.skipped or f"no precision is known to be faster than f32 on {resolved.options.device}"
            return self._chosen(resolved, {"chosen": "f32", "why": why, "tried": {}})
        settings = self._compilation.cache_settings()
        store = open_cache(resolved.options.cache_dir if resolved.options.model_caching else None, settings)
        names = [case.name for case in self._shapes.cases]
        beside = fingerprint(self._int8._eager).weights if self._int8 is not None else ""
        bounds = self._admission.bounds
        decisions = precision.Decisions(store, self._context.model_dir, self._eager, resolved, names, beside, bounds)
        with decisions.lock():
            facts = decisions.load()
            if facts is None:
                facts = self._measure(resolved, tried)
                if not decisions.save(facts) and facts["chosen"] != "f32":
                    facts |= {"chosen": "f32", "why": "the decision cannot be stored for the other workers"}
        return self._chosen(resolved, facts)

    def _chosen(self, resolved: ResolvedOptions, facts: dict[str, Any]) -> Prepared:
        """Compiles and verifies the model in the precision that `precision: auto` chose."""
        name = facts["chosen"]
        logger.info("Precision %s is served (%s: auto): %s", name, precision.KEY, facts)
        prepared = self._candidate(name)._admitted(
            precision.with_precision(resolved, _hint(name), f"{precision.KEY}: auto")
        )
        prepared.report.tracker.set_config("precision_choice", facts)
        return prepared

    def _admitted(self, resolved: ResolvedOptions | None) -> Prepared:
        """Compiles the model, and compares it with eager PyTorch where that is possible."""
        prepared = self._compilation.make(resolved, open_axes=self._graph.open_axes)
        if flaw := self._graph.flaw(prepared.report.summary):
            prepared = self._one_for_each(prepared, resolved, flaw)
        if self._admission.skipped:
            self._admission.note_skipped(prepared.report, type(self._eager).__name__)
        else:
            prepared = self._verified(prepared, resolved)
        if self._shapes.inputs is not None:
            prepared.report.tracker.set_config("one_graph", self._graph.to_plain())
        return prepared

    def _one_for_each(self, prepared: Prepared, resolved: ResolvedOptions | None, flaw: str) -> Prepared:
        """Compiles the model again, with one graph for each shape, because fewer graphs have a flaw."""
        logger.warning("Compiling one graph for each shape: with fewer graphs, %s", flaw)
        self._graph = one_graph.Choice(f"with fewer graphs {flaw}")
        if isinstance(prepared.model.compiled, CompiledModule):
            prepared.model.compiled.drop()
        return self._compilation.make(resolved)

    def _verified(self, prepared: Prepared, resolved: ResolvedOptions | None) -> Prepared:
        """Compares the model's answers with eager PyTorch's; compiles it again if wrong ones came from the cache."""
        result = self._admission.compare(prepared.model, prepared.report)
        compiled = prepared.model.compiled
        if not result["passed"] and isinstance(compiled, CompiledModule) and compiled.reject_cached():
            problem = verify.failure(result)
            logger.warning("Answers from the cache differ from eager's, compiling again: %s", problem)
            prepared = self._compilation.make(resolved, open_axes=self._graph.open_axes)
            prepared.report.tracker.add_note(f"entries of the cache were rejected: {problem}")
            result = self._admission.compare(prepared.model, prepared.report)
        elif isinstance(compiled, CompiledModule):
            compiled.confirm_cached()
        if not result["passed"] and self._graph.limit:
            prepared = self._one_for_each(prepared, resolved, verify.failure(result))
            result = self._admission.compare(prepared.model, prepared.report)
        self._admission.judge(prepared.report, result)
        return prepared

    def _with_threads(self) -> ResolvedOptions | None:
        """Returns the backend's options, with this worker's share of the cores where the user set no number."""
        resolved, added = self._context.config.backend, self._context.threads.ov_config()
        if resolved is None or not added:
            return resolved
        given = self._context.threads.sources
        reasons = {"NUM_STREAMS": given["streams"], "ENABLE_CPU_PINNING": "several workers share the cores"}
        sources = {f"config.{name}": reasons.get(name, given["openvino_threads"]) for name in added}
        config = {**resolved.options.config, **added}
        return replace(
            resolved,
            options=replace(resolved.options, config=config),
            sources={**resolved.sources, **sources},
        )

    def _candidate(self, name: str) -> "Preparation":
        """Returns what prepares the model for a precision."""
        return self._int8 if self._int8 is not None and name == precision.INT8 else self

    def _measure(self, resolved: ResolvedOptions, tried: Sequence[str]) -> dict[str, Any]:
        """Compiles and verifies each precision, and times it against f32; returns the choice, JSON-safe."""
        base: Prepared | None = None
        trials: list[precision.TimedPrecision] = []
        for name in tried:
            logger.info("Precision %s: compiling, verifying, timing", name)
            # Without the cache, which may be packaged in an archive: losing trials would only fill it.
            options = precision.with_precision(resolved, _hint(name), f"{precision.KEY}: auto")
            of = self._candidate(name)
            prepared = of._compilation.make(options, open_axes=of._graph.open_axes, cached=False)
            result = of._admission.compare(prepared.model, prepared.report, name)
            trial = precision.TimedPrecision(name, result, coverage=prepared.report.summary.coverage)
            if base is None:
                base = prepared
            else:
                pairs = precision.timed_pairs(self._calls(base), self._calls(prepared))
                gain, sure = statistics.median(pairs), precision.sure_median(pairs)
                trial = replace(trial, gain=gain, sure_gain=sure, pairs=len(pairs))
            trials.append(trial)
        del (
            prepared,
            base,
        )
        # Dynamo keeps what it compiled as long as the model lives; only the winner may take memory.
        torch.compiler.reset()
        return precision.explain(trials, precision.choose(trials))

    def _calls(self, prepared: Prepared) -> Callable[[], object]:
        """Returns a function that calls the model once with its smallest and once with its largest case.

        A model of twenty shapes would else be timed for minutes; all shapes are verified.
        """
        cases = sorted(self._shapes.cases, key=lambda case: _values(case.inputs))
        timed = [cases[0], cases[-1]] if len(cases) > 1 else cases
        return lambda: [run_case(prepared.model.compiled, prepared.model, case) for case in timed]

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


def _values(inputs: Inputs) -> int:
    """Returns how many numbers a call is given."""
    return sum(tensor.numel() for tensor in output_tensors(inputs))
