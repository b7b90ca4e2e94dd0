"""First stage: Dynamo's graph, lowered by AOTAutograd to functional ATen operators.

AOTAutograd handles mutated inputs, returned views and autograd; the graph that reaches the next stage is functional.
"""

import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchserve_openvino.backend.backend_settings import BackendSettings
from torchserve_openvino.backend.capture.frame_log import count_graph_break
from torchserve_openvino.backend.capture.graph import CompiledGraph, Lowered, SharedGraph
from torchserve_openvino.backend.partitioning.partition import input_shapes, is_dynamic
from torchserve_openvino.backend.partitioning.views import computed_views
from torchserve_openvino.backend.upstream import _torch_kept, _torch_modes
from torchserve_openvino.backend.upstream import _torch_private as private
from torchserve_openvino.ops.memory_order import without_base
from torchserve_openvino.ops.names import does_work, op_name, where_of
from torchserve_openvino.ops.opaque_ops import OPAQUE_OPS
from torchserve_openvino.ops.padded_encoders import last_layers, zero_padding
from torchserve_openvino.passes.lists import FX_PASSES
from torchserve_openvino.passes.manager import run_passes
from torchserve_openvino.passes.pass_context import PassContext
from torchserve_openvino.report.records import GraphRecord

logger = logging.getLogger(__name__)

# AOTAutograd raises for those of an input, or makes views of memory that is too small (tests/contract).
_RESIZES = (torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default)


class OpenVINOBackend:
    """A backend for ``torch.compile``, for one model.

    Args:
        settings: Settings of this model; their tracker collects all records.
        model: The model, if it is known.

    Attributes:
        settings: Those of the call that runs: graphs are compiled anew for others, not traced anew.
    """

    def __init__(self, settings: BackendSettings, model: Any = None) -> None:
        self.settings = settings
        self._model = model
        self._graphs: weakref.WeakSet[SharedGraph] = weakref.WeakSet()
        # The backend's name in Dynamo's own logs.
        self.__name__ = "openvino_serving"
        _torch_kept.keep_undecomposed(OPAQUE_OPS)
        _torch_kept.take_masks()
        _torch_modes.repair_aliasing_check()

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], source: str = "") -> Any:
        """Compiles one graph; called by Dynamo.

        Args:
            gm: The graph.
            example_inputs: Its inputs.
            place: Where the graph starts, if its operators do not record it.
        """
        # For callers without `watch_frames`. If gradients are recorded, their operators are already decomposed.
        keeps = not torch.is_grad_enabled()
        with _torch_kept.kept_whole(converter=self.settings.converter) if keeps else nullcontext():
            return self._lower(gm, example_inputs, source)

    def _lower(self, gm: GraphModule, example_inputs: Sequence[Any], source: str) -> Any:
        zero_padding(gm.graph, last_layers(self._model))
        gm.recompile()
        start = time.perf_counter()
        self.settings.tracker.cache.traces += 1
        # Only for callers without `watch_frames`, whose `FrameLog` counts it first.
        if fact := private.graph_break_of(gm):
            count_graph_break(self.settings.tracker, fact)
        where = _where(gm) or source
        compile_stage = functools.partial(self._compile, compile_id=private.compile_id(), where=where, start=start)
        if resized := [node for node in gm.graph.nodes if node.target in _RESIZES]:
            return self._left_in_eager(gm, resized, where)
        lower = private.aot_autograd(
            inference_compiler=functools.partial(compile_stage, stage="inference"),
            fw_compiler=functools.partial(compile_stage, stage="forward"),
            bw_compiler=functools.partial(compile_stage, stage="backward"),
            decompositions=self.settings.decompositions,
        )
        return lower(gm, example_inputs)

    def _left_in_eager(self, gm: GraphModule, causes: Sequence[Node], where: str) -> Any:
        """Counts a graph that runs as Dynamo recorded it."""
        total = sum(node.op.startswith("call_") for node in gm.graph.nodes)
        self.settings.tracker.add_graph(GraphRecord(private.compile_id(), where, "inference", ops_total=total))
        for node in causes:
            reason = "changes the memory of a tensor, which no functional operator does: its graph is not lowered"
            self.settings.tracker.add_fallback(
                "unsupported_op", str(node.target), reason=reason, where=where_of(node) or where
            )
        return gm.forward

    def release_weights(self, settings: BackendSettings) -> None:
        """See `CompiledGraph.release_weights`; of the graphs that were compiled for some settings."""
        for graph in self._of(settings):
            graph.release_weights()

    def drop(self, settings: BackendSettings) -> None:
        """See `CompiledGraph.drop`; of the graphs that were compiled for some settings."""
        for graph in self._of(settings):
            graph.drop()

    def _of(self, settings: BackendSettings) -> list[CompiledGraph]:
        return [graph for shared in list(self._graphs) if (graph := shared.known_to(settings)) is not None]

    def _compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], *, stage: str, compile_id: str, where: str, start: float
    ) -> Any:
        """Compiles one lowered graph; called by AOTAutograd, for a backward graph possibly much later."""
        if stage == "backward":
            start = time.perf_counter()
        # The saved tensors of a backward graph are new at each call: none is a constant.
        facts = private.GraphFacts() if stage == "backward" else private.graph_facts()
        run_passes(FX_PASSES, "graph", gm.graph, PassContext(static=facts.static - facts.mutated))
        decomposed = {name: dataclasses.asdict(op) for name, op in decomposed_ops(gm.graph).items()}
        record = GraphRecord(
            compile_id,
            where,
            stage,
            ops_total=0,
            dynamic=is_dynamic(gm),
            decomposed=decomposed,
            inputs=input_shapes(gm, facts.static),
        )
        graph = SharedGraph(Lowered(gm, facts, record))
        compiled = graph.compiled(self.settings)
        self.settings.recorder.newest = graph.lowered
        self._graphs.add(graph)
        compiled.record.lower_seconds = time.perf_counter() - start

        views = computed_views(gm.graph) if stage == "forward" else []

        # A plain function, because Dynamo wraps the result and preserves `_boxed_call` only for functions.
        def boxed(args: list[Any]) -> Any:
            results = graph.compiled(self.settings)(args)
            if views:
                # Autograd refuses to write in place to a view that was made inside a compiled function.
                results = list(results)
                for positions in views:
                    fresh = without_base(results[positions[0]])
                    for position in positions:
                        # A tensor that is returned twice stays one.
                        results[position] = fresh
            return results

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed


def _where(gm: GraphModule) -> str:
    """Returns the line of the user's code at which the graph starts."""
    for node in gm.graph.nodes:
        if node.op.startswith("call_") and (where := where_of(node)):
            return where
    return ""


# --- finds in the lowered graph which operators were decomposed before partitioning, and into what ----------------


@dataclass
class Decomposed:
    """An operator that was decomposed.

    Attributes:
        count: Number of calls; two consecutive calls in the same line of code count once.
        into: Maps each resulting operator of the lowered graph to its number of nodes.
        where: ``file:line`` of the first call.
    """

    count: int = 0
    into: dict[str, int] = field(default_factory=dict)
    where: str = ""


def decomposed_ops(graph: Graph) -> dict[str, Decomposed]:
    """Returns the decomposed operators by the names under which the model calls them.

    Args:
        graph: AOTAutograd's lowered graph, whose nodes record the operators that they come from.
    """
    by_name: dict[str, Decomposed] = {}
    last: tuple[str, str] | None = None
    for node in graph.nodes:
        if node.op != "call_function" or not does_work(node):
            continue
        origin = node.meta.get("original_aten")
        if not isinstance(origin, torch._ops.OpOverload) or op_name(origin) == op_name(node.target):
            last = None
            continue
        name, trace = op_name(origin), node.meta.get("stack_trace") or ""
        entry = by_name.setdefault(name, Decomposed(where=where_of(node)))
        entry.count += last != (name, trace)
        part = op_name(node.target)
        entry.into[part] = entry.into.get(part, 0) + 1
        last = (name, trace)
    return by_name
