"""Compiles and verifies the graphs that a task calls by itself before READY, each as any other model."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from torchserve_openvino.config.sections.openvino_section import WarmupInput
from torchserve_openvino.report import CompileReport, Tracker
from torchserve_openvino.serving.compilation import Prepared
from torchserve_openvino.serving.models import Models
from torchserve_openvino.serving.modes import SERVING
from torchserve_openvino.serving.prepare import Preparation, probe_shapes
from torchserve_openvino.serving.shapes.plan import Shapes
from torchserve_openvino.serving.verification.measures import Relative
from torchserve_openvino.serving.worker_context import WorkerContext

# --- graphs of a pipeline or of a loop that generates: compiled each by itself, and called in the models' place


class GraphCalls:
    """Calls of a graph: in eager PyTorch until compiled ones take their place.

    Args:
        graph: The module.
    """

    def __init__(self, graph: nn.Module) -> None:
        self.graph = graph.eval()
        self._compiled: dict[tuple[int, ...], Callable[..., Any]] = {}

    def use(self, shape: Sequence[int], compiled: Callable[..., Any]) -> None:
        """Runs calls whose first input has this shape, without the batch, by ``compiled`` from now on."""
        self._compiled[tuple(shape)] = compiled

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        """Runs a call.

        Raises:
            KeyError: Graphs are compiled, but none for this shape. Requests of such sizes are refused before.
        """
        if not self._compiled:
            return self.graph(*inputs, **named)
        first = next(iter((*inputs, *named.values())))
        compiled = self._compiled[tuple(first.shape[1:])]
        # Pixels of a picture file lie in another order, for which a graph would be compiled anew.
        ordered = {name: tensor.contiguous() for name, tensor in named.items()}
        return compiled(*(tensor.contiguous() for tensor in inputs), **ordered)


@dataclass(frozen=True)
class SizedGraph:
    """One graph for one size.

    Attributes:
        name: For the report, with the size where there are several.
        calls: The graph, whose calls the compiled one takes over.
        inputs: Its inputs, one item each.
        batches: Batch sizes that it is called with.
        known: What to compile, instead of what follows from ``inputs``.
    """

    name: str
    calls: GraphCalls
    inputs: Sequence[WarmupInput]
    batches: tuple[int, ...] = (1,)
    known: Shapes | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first input, without the batch; empty where none is declared."""
        return tuple(int(size) for size in self.inputs[0].shape) if self.inputs else ()


# --- compilation and verification of parts before READY -----------------------------------------------------------


logger = logging.getLogger(__name__)


def compile_parts(parts: Iterable[SizedGraph], context: WorkerContext) -> Models:
    """Compiles each part for its batch sizes, compares it with eager PyTorch, and lets it take the calls.

    Args:
        parts: The graphs.
        context: What the worker knows.

    Raises:
        VerificationError: See `Preparation.run`.
    """
    models = Models(None, CompileReport(Tracker()))
    tracker = models.report.tracker
    models.parts = prepare_parts(parts, replace(context, tracker=tracker))
    if context.config.openvino.verify.against != "off":
        tracker.verify.state({**tracker.verify.to_dict(), "passed": tracker.verify.passed})
    return models


def prepare_parts(parts: Iterable[SizedGraph], context: WorkerContext, within: str = "") -> dict[str, Prepared]:
    """Prepares each part as `compile_parts` does, beside other models of the same handler.

    Args:
        parts: The graphs.
        context: What the worker knows; its tracker records everything for the report.
        within: What the parts belong to, for their names in the report.

    Returns:
        What was prepared, by name.

    Raises:
        VerificationError: See `Preparation.run`.
    """
    tracker = context.tracker
    assert tracker is not None
    prepared_parts: dict[str, Prepared] = {}
    facts: dict[str, dict[str, Any]] = {}
    for part in parts:
        name = f"{within}: {part.name}" if within else part.name
        graphs, fallbacks = list(tracker.graphs), sum(tracker.fallback_counts().values())
        for_part = _for_part(context, part)
        shapes = part.known or probe_shapes(part.calls.graph, for_part, declared=part.inputs)
        prepared = Preparation(part.calls.graph, for_part, shapes, part=name, measure=Relative()).run()
        part.calls.use(part.shape, prepared.model)
        prepared_parts[name] = prepared
        facts[name] = {
            **_coverage([graph for graph in tracker.graphs if not any(graph is old for old in graphs)], prepared),
            "fallbacks": sum(tracker.fallback_counts().values()) - fallbacks,
        }
        logger.info("%s is compiled: %s", name, facts[name])
    tracker.set_config("components", {**tracker.config.get("components", {}), **facts})
    return prepared_parts


def _for_part(context: WorkerContext, part: SizedGraph) -> WorkerContext:
    """Returns the context with the batch sizes of a part: it is called with these and no others."""
    config, section = context.config, context.config.openvino
    warmup = section.warmup.model_copy(update={"batch_sizes": list(part.batches)})
    batching = section.batching.model_copy(update={"mode": "exact", "outside": "refuse"})
    own = section.model_copy(update={"warmup": warmup, "batching": batching})
    return replace(
        context, config=config.model_copy(update={"openvino": own}), batch_size=max(part.batches), freezes=True,
        modes_for=lambda inputs: SERVING,
    )  # fmt: skip


def _coverage(graphs: list[Any], prepared: Prepared) -> dict[str, Any]:
    total = sum(graph.ops_total for graph in graphs)
    ours = sum(graph.ops_on_openvino for graph in graphs)
    return {
        "signatures": [str(signature) for signature in prepared.signatures],
        "graphs": len(graphs),
        "partitions": sum(len(graph.partitions) for graph in graphs),
        "ops_total": total,
        "ops_on_openvino": ours,
        "coverage": ours / total if total else 1.0,
    }
