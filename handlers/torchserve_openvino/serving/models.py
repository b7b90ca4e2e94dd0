"""Compiles all models of one handler: ``self.model``, and the modules and methods that the handler calls directly."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchserve_openvino.config.sections.openvino_section import WarmupInput
from torchserve_openvino.report import CompileReport, Tracker
from torchserve_openvino.serving.observation.methods import MethodGraph, Redirected
from torchserve_openvino.serving.observation.observe import ROOT, ObservedCall, Seen, unique
from torchserve_openvino.serving.prepare import Preparation, Prepared, probe_shapes
from torchserve_openvino.serving.served import describe
from torchserve_openvino.serving.verification.measures import Measure
from torchserve_openvino.serving.worker_context import MethodCompiler, WorkerContext, compiler_of

logger = logging.getLogger(__name__)


@dataclass
class Models:
    """The compiled models of one handler.

    Attributes:
        root: ``self.model``; None if that is not a module.
        parts: Modules that the handler calls directly, by path.
        report: One report about all of them.
        loops: Whether the parts do all the work, and only a loop around them is left to PyTorch.
    """

    root: Prepared | None
    report: CompileReport
    parts: dict[str, Prepared] = field(default_factory=dict)
    loops: bool = False

    @property
    def ran(self) -> bool:
        """Whether any call was run before READY."""
        return any(prepared.cases for prepared in self._all)

    @property
    def needs_no_torch(self) -> bool:
        """Whether every declared call runs on OpenVINO only."""
        if self.loops:
            return all(prepared.needs_no_torch for prepared in self._all)
        return self.root is not None and self.root.needs_no_torch and not self.parts

    @property
    def _all(self) -> list[Prepared]:
        return [*([self.root] if self.root is not None else []), *self.parts.values()]

    @property
    def memory(self) -> dict[str, dict[str, int]]:
        """Memory before and after the eager weights were freed."""
        return self.root.memory if self.root is not None else {}

    def describe(self) -> dict[str, Any]:
        """Returns how requests are fitted to compiled shapes, JSON-safe."""
        shapes = describe(self.root.model, self.root.signatures) if self.root is not None else {}
        parts = {path: describe(part.model, part.signatures) for path, part in self.parts.items()}
        return {**shapes, "parts": parts} if parts else shapes


@dataclass(frozen=True)
class RootModel:
    """``self.model`` of a handler, and what is known of it before it is compiled.

    Attributes:
        eager: The model as loaded; None if it is not a module.
        declared: Its inputs, one item each; empty where they are unknown.
        learns: Whether the samples stand for all requests, so that other shapes are refused.
        quantized: The same in int8, for ``precision: auto`` to choose; None if there is none.
        measure: How the task judges a narrower precision; None if only numbers are compared.
    """

    eager: Any
    declared: Sequence[WarmupInput] = ()
    learns: bool = False
    quantized: Any = None
    measure: Measure | None = None


def prepare_models(
    root: RootModel, seen: Seen, context: WorkerContext, method_compilers: Sequence[MethodCompiler] = ()
) -> Models:
    """Compiles and verifies the models, and redirects the handler's calls of parts to the compiled ones.

    Args:
        root: ``self.model``.
        seen: Calls that the samples showed, modules that the YAML names, and those whose inputs a task declares.
        context: What the worker knows.
        method_compilers: Compile some methods in another way than as one graph.

    Raises:
        VerificationError: See `Preparation.run`.
    """
    calls = {path: unique(some) for path, some in seen.calls.items()}
    models = Models(None, CompileReport(Tracker()))
    compilers = {path: compiler_of(part, method_compilers) for path, part in seen.parts.items()}
    if root.eager is not None:
        # Samples that only call other modules show nothing about `self.model`.
        idle = (calls or any(compilers.values())) and ROOT not in calls and not root.declared
        models.root = _prepared_root(root, calls.get(ROOT, []), context, idle=bool(idle))
        models.report = models.root.report
    context = replace(context, tracker=models.report.tracker)
    for path, module in seen.parts.items():
        if (compiler := compilers[path]) is not None:
            assert isinstance(module, MethodGraph)
            method = compiler.prepare(module, [call.inputs for call in calls.get(path, [])], path, context)
            models.parts.update(method.graphs)
            Redirected(module, method.call)
            continue
        if module is root.eager:
            assert models.root is not None
            Redirected(module, models.root.model)
            continue
        samples, declared = calls.get(path, []), seen.declared.get(path, ())
        shapes = probe_shapes(module, context, declared=declared, samples=samples)
        part = Preparation(module, context, shapes, part=path, measure=seen.measures.get(path))
        prepared = part.run() if samples or declared else part.unasked()
        if not samples and not declared:
            models.report.tracker.add_note(f"no sample calls {path}; it compiles at the first request that does")
        logger.info("%s is compiled separately, for %d sample call(s)", path, len(samples))
        models.parts[path] = prepared
        Redirected(module, prepared.model)
    for note in seen.notes:
        models.report.tracker.add_note(note)
    return models


def _prepared_root(root: RootModel, samples: Sequence[ObservedCall], context: WorkerContext, *, idle: bool) -> Prepared:
    """Prepares ``self.model``; ``idle`` if no sample calls it, but other modules."""
    shapes = probe_shapes(root.eager, context, declared=root.declared, samples=samples, learns=root.learns)
    preparation = Preparation(
        root.eager, context, shapes, quantized=root.quantized, measure=root.measure, is_first=True
    )
    if not idle:
        return preparation.run()
    prepared = preparation.unasked(idle=True)
    prepared.report.tracker.add_note("no sample calls self.model itself; it compiles at the first request that does")
    return prepared
