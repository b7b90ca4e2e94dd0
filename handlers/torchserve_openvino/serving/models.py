"""Compiles all models of one handler: ``self.model``, and the modules and methods that the handler calls directly."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchserve_openvino.report import CompileReport, Tracker
from torchserve_openvino.serving.observation.methods import MethodGraph, Redirected
from torchserve_openvino.serving.observation.observe import ROOT, Call, Seen, unique
from torchserve_openvino.serving.prepare import Preparation, Prepared
from torchserve_openvino.serving.served import describe

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


def prepare_models(eager: Any, seen: Seen, declared: Sequence[Any], *, learns: bool, **settings: Any) -> Models:
    """Compiles and verifies the models, and redirects the handler's calls of parts to the compiled ones.

    Args:
        eager: ``self.model`` as loaded; None if it is not a module.
        seen: Calls that the samples showed, modules that the YAML names, and those whose inputs a task declares.
        declared: Inputs of ``self.model``, one item each.
        learns: Whether the samples stand for all requests, so that other shapes are refused.
        settings: Further arguments of `Preparation`.

    Raises:
        VerificationError: See `Preparation.run`.
    """
    calls = {path: unique(some) for path, some in seen.calls.items()}
    models = Models(None, CompileReport(Tracker()))
    generates = [path for path, part in seen.parts.items() if isinstance(part, MethodGraph) and part.generates]
    quantized, measure = settings.pop("quantized", None), settings.pop("measure", None)
    if eager is not None:
        root = Preparation(
            eager, quantized=quantized, declared=declared, samples=calls.get(ROOT, []), learns=learns, measure=measure,
            **settings,
        )  # fmt: skip
        # Samples that only call other modules show nothing about `self.model`.
        idle = (calls or generates) and ROOT not in calls and not declared
        prepared = root.unasked() if idle else root.run()
        models.root, models.report = prepared, prepared.report
        if idle:
            models.report.tracker.add_note(
                "no sample calls self.model itself; it compiles at the first request that does"
            )
    for path, module in seen.parts.items():
        if path in generates:
            assert isinstance(module, MethodGraph)
            Redirected(module, _generate(models, module, path, calls.get(path, []), settings))
            continue
        if module is eager:
            assert models.root is not None
            Redirected(module, models.root.model)
            continue
        samples: list[Call] = calls.get(path, [])
        known = seen.declared.get(path, ())
        tracker = models.report.tracker
        part = Preparation(module, declared=known, samples=samples, part=path, tracker=tracker, **settings)
        prepared = part.run() if samples or known else part.unasked()
        if not samples and not known:
            models.report.tracker.add_note(f"no sample calls {path}; it compiles at the first request that does")
        logger.info("%s is compiled separately, for %d sample call(s)", path, len(samples))
        models.parts[path] = prepared
        Redirected(module, prepared.model)
    for note in seen.notes:
        models.report.tracker.add_note(note)
    return models


def _generate(
    models: Models, part: MethodGraph, path: str, calls: Sequence[Call], settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compiles the `generate` of a model of transformers, and returns what runs its calls."""
    # Imported here: it imports transformers, which takes seconds.
    from torchserve_openvino.generation.compiled.method import Worker, prepare_generate

    names = ("config", "threads", "counters", "model_dir", "batch_size")
    worker = Worker(**{name: settings[name] for name in names}, tracker=models.report.tracker)
    made, call = prepare_generate(part.owner, part.function, [each.inputs for each in calls], path, worker)
    models.parts.update(made)
    return call
