"""Compiles the model, runs it, and keeps what each graph of one call was given, with its times."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from torchserve_openvino.backend import CompiledModule
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.instrumentation import Instrumentation, Observation
from torchserve_openvino.backend.partitioning.partition import RefusedNode
from torchserve_openvino.doctor.target import Call, Target
from torchserve_openvino.doctor.timing import time_nodes
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.ops import does_work

CALLS = 7
BUDGET_SECONDS = 2.0


@dataclass
class GraphRun:
    """One graph that a call of the model runs, perhaps several times.

    Attributes:
        graph: What was built.
        left_out: The nodes that stay in eager PyTorch, with the reason of each.
        part_of: Name of the partition by the name of the node.
        node_ms: Of each node of the lowered graph in eager PyTorch, for one call of the model.
        outer_ms: Of each node of the outer graph: partitions on OpenVINO, the rest in eager.
        arguments: Of each node that was left out.
        weights: Names of the placeholders that stand for the model's own tensors.
    """

    graph: Observation
    left_out: dict[Node, RefusedNode]
    part_of: dict[str, str]
    node_ms: dict[str, float] = field(default_factory=dict)
    outer_ms: dict[str, float] = field(default_factory=dict)
    arguments: dict[str, Call] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, graph: Observation) -> "GraphRun":
        """Finds out where each node went."""
        parts = graph.partitioned.parts
        part_of = {node.name: part.name for part in parts for node in part.graph.graph.nodes if does_work(node)}
        # Nodes keep their names on their way into the outer graph and the parts, and `left_out` keeps their order.
        outside = [n for n in graph.lowered.graph.nodes if does_work(n) and n.name not in part_of]
        return cls(graph, dict(zip(outside, graph.partitioned.left_out, strict=True)), part_of)

    def runs_on(self, node: Node) -> str:
        """``openvino``, or who runs it instead."""
        return self.part_runs_on(self.part_of[node.name]) if node.name in self.part_of else "eager"

    def part_runs_on(self, name: str) -> str:
        """As `runs_on`, for a partition."""
        return next(record.runs_on for record in self.graph.record.partitions if record.name == name)

    def note_weights(self, args: Sequence[Any], weights: frozenset[int]) -> None:
        """Finds the weights among the arguments of a call by their memory."""
        placeholders = self.graph.lowered.graph.find_nodes(op="placeholder")
        for node, value in zip(placeholders, args, strict=True):
            if isinstance(value, torch.Tensor) and value.data_ptr() in weights:
                self.weights.add(node.name)

    def add_times(self, args: Sequence[Any]) -> None:
        """Runs both graphs node by node on the arguments of one call."""
        wanted = frozenset(node.name for node in self.left_out)
        eager = time_nodes(self.graph.lowered, args, wanted=wanted)
        outer = time_nodes(self.graph.partitioned.outer, args, self.graph.calls)
        self.arguments = {**eager.arguments, **self.arguments}
        for total, found in ((self.node_ms, eager), (self.outer_ms, outer)):
            for name, seconds in found.seconds.items():
                total[name] = total.get(name, 0.0) + seconds * 1e3


@dataclass
class Measured:
    """What running the model showed.

    Attributes:
        compiled: The compiled model.
        expected: Eager's answer.
        got: OpenVINO's.
        eager_ms: Median of a call in eager PyTorch.
        compiled_ms: Median of a compiled call.
        graphs: What a call runs, in order.
        report: The compile report after those calls.
    """

    compiled: CompiledModule
    expected: Any
    got: Any
    eager_ms: float
    compiled_ms: float
    graphs: list[GraphRun]
    report: dict[str, Any]


def measure(target: Target, progress: Callable[[str], None]) -> Measured:
    """Runs a model in eager PyTorch and on OpenVINO.

    Args:
        target: The model.
        progress: Called with what is under way, in words.

    Raises:
        ModelLoadError: Eager PyTorch does not take the inputs.
    """
    calls: list[tuple[Observation, tuple[Any, ...]]] = []
    recording = False

    def called(graph: Observation, args: Sequence[Any]) -> None:
        if recording:
            calls.append((graph, tuple(args)))

    progress("running eager PyTorch")
    try:
        expected, eager_ms = timed_call(target.model, target.call)
    except Exception as error:
        raise ModelLoadError(
            f"{target.name} fails in eager PyTorch on these inputs: {type(error).__name__}: {error}"
        ) from error
    progress("compiling for OpenVINO")
    compiled = compile_with(
        target.model,
        CompileSpec(dynamic=target.dynamic, resolved=target.options, instrumentation=Instrumentation(called=called)),
    )
    # The second call settles what depends on the first, such as tensors made in inference mode.
    run(compiled, target.call)
    progress("running on OpenVINO")
    with compiled.poisoned():
        got = run(compiled, target.call)
    _, compiled_ms = timed_call(compiled, target.call)
    recording = True
    run(compiled, target.call)
    recording = False
    report = compiled.report.to_dict()
    progress("timing each operator")
    graphs: dict[int, GraphRun] = {}
    model = target.model
    owned = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
    weights = frozenset(tensor.data_ptr() for tensor in owned)
    for graph, args in calls:
        found = graphs.setdefault(id(graph), GraphRun.of(graph))
        found.note_weights(args, weights)
        found.add_times(args)
    return Measured(compiled, expected, got, eager_ms, compiled_ms, list(graphs.values()), report)


def run(model: Callable[..., Any], call: Call) -> Any:
    """One call, on copies of the inputs: a model may write to them."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, tuple(call))
    with torch.inference_mode():
        return model(*args, **kwargs)


def timed_call(model: Callable[..., Any], call: Call) -> tuple[Any, float]:
    """The answer, and the median of some calls in milliseconds, after one that is not counted."""
    result = run(model, call)
    seconds: list[float] = []
    while len(seconds) < CALLS and sum(seconds) < BUDGET_SECONDS:
        start = time.perf_counter()
        result = run(model, call)
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds) * 1e3
