"""Compiles and runs the model, and records the arguments and times of each graph in one call."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from torchserve_openvino.backend import CompiledModule
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.instrumentation import Instrumentation, Observation
from torchserve_openvino.backend.partitioning.partition import RefusedNode
from torchserve_openvino.backend.runtime.compare import copied
from torchserve_openvino.doctor.fixed_state import FixedState, call_once
from torchserve_openvino.doctor.target import SampleCall, Target
from torchserve_openvino.doctor.timing import time_nodes
from torchserve_openvino.errors import ModelLoadError, class_and_line
from torchserve_openvino.ops import does_work
from torchserve_openvino.serving.shapes.input_spec import Inputs

CALLS = 7
BUDGET_SECONDS = 2.0


@dataclass
class GraphRun:
    """One graph that a call of the model runs, possibly several times.

    Attributes:
        graph: The graph as it was built.
        left_out: The nodes that stay in eager PyTorch, with the reason of each.
        part_of: Partition name by node name.
        node_ms: Milliseconds of each node of the lowered graph in eager PyTorch, for one call of the model.
        outer_ms: Milliseconds of each node of the outer graph: partitions on OpenVINO, the rest in eager.
        arguments: Arguments of each node that was left out.
        weights: Names of the placeholders that stand for the model's own tensors.
    """

    graph: Observation
    left_out: dict[Node, RefusedNode]
    part_of: dict[str, str]
    node_ms: dict[str, float] = field(default_factory=dict)
    outer_ms: dict[str, float] = field(default_factory=dict)
    arguments: dict[str, SampleCall] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, graph: Observation) -> "GraphRun":
        """Creates an instance; finds out which nodes are in which partition, and which were left out."""
        parts = graph.partitioned.parts
        part_of = {node.name: part.name for part in parts for node in part.graph.graph.nodes if does_work(node)}
        # Nodes keep their names in the outer graph and the parts, and `left_out` keeps their order.
        outside = [n for n in graph.lowered.graph.nodes if does_work(n) and n.name not in part_of]
        return cls(graph, dict(zip(outside, graph.partitioned.left_out, strict=True)), part_of)

    def runs_on(self, node: Node) -> str:
        """Returns ``openvino``, or what runs the node instead."""
        return self.part_runs_on(self.part_of[node.name]) if node.name in self.part_of else "eager"

    def part_runs_on(self, name: str) -> str:
        """Like `runs_on`, for a partition."""
        return next(record.runs_on for record in self.graph.record.partitions if record.name == name)

    def note_weights(self, args: Sequence[Any], weights: frozenset[int]) -> None:
        """Finds the weights among the arguments of a call by their data pointers."""
        placeholders = self.graph.lowered.graph.find_nodes(op="placeholder")
        for node, value in zip(placeholders, args, strict=True):
            if isinstance(value, torch.Tensor) and value.data_ptr() in weights:
                self.weights.add(node.name)

    def add_times(self, args: Sequence[Any]) -> None:
        """Runs both graphs node by node on the arguments of one call and adds up the times."""
        kept_names = frozenset(node.name for node in self.left_out)
        eager = time_nodes(self.graph.lowered, args, names=kept_names)
        outer = time_nodes(self.graph.partitioned.outer, args, self.graph.calls)
        self.arguments = {**eager.arguments, **self.arguments}
        for total, times in ((self.node_ms, eager), (self.outer_ms, outer)):
            for name, seconds in times.seconds.items():
                total[name] = total.get(name, 0.0) + seconds * 1e3


@dataclass(frozen=True)
class Answer:
    """The answers to one set of values.

    Attributes:
        expected: That of eager PyTorch.
        got: That of the compiled model; None if it raises.
        error: The exception that it raises, ``Type: message``; empty for none.
    """

    expected: Any
    got: Any
    error: str = ""


@dataclass
class Measured:
    """Result of `measure`.

    Attributes:
        compiled: The compiled model.
        answers: The answers to the call; then those to its values in reverse, unless eager PyTorch refuses them.
        eager_ms: Median time of a call in eager PyTorch, milliseconds.
        compiled_ms: Median time of a compiled call, milliseconds.
        graphs: The graphs that a call runs, in order.
        report: The compile report after those calls.
    """

    compiled: CompiledModule
    answers: list[Answer]
    eager_ms: float
    compiled_ms: float
    graphs: list[GraphRun]
    report: dict[str, Any]


def measure(target: Target, progress: Callable[[str], None]) -> Measured:
    """Runs a model in eager PyTorch and on OpenVINO, from the same state where answers are compared.

    Args:
        target: The model.
        progress: Called with a short description of each step.

    Raises:
        ModelLoadError: The model fails in eager PyTorch on these inputs.
    """
    calls: list[tuple[Observation, tuple[Any, ...]]] = []
    recording = False

    def called(graph: Observation, args: Sequence[Any]) -> None:
        if recording:
            calls.append((graph, tuple(args)))

    progress("running eager PyTorch")
    try:
        eager_ms = timed_call(target.model, target.call)
    except Exception as error:
        raise ModelLoadError(
            f"{target.name} fails in eager PyTorch on these inputs: {type(error).__name__}: {error}"
        ) from error
    progress("compiling for OpenVINO")
    compiled = compile_with(
        target.model,
        CompileSpec(
            dynamic=target.dynamic,
            backend=target.backend,
            resolved=target.options,
            instrumentation=Instrumentation(called=called),
        ),
    )
    for note in target.notes:
        compiled.report.tracker.add_note(note)
    # Call once before comparing: what depends on a first call, such as tensors made in inference mode, settles then.
    call_once(compiled, target.call)
    progress("running on OpenVINO")
    state = FixedState(target.model)
    answers = [_answer(state, compiled, *check) for check in state.eager_answers(target.call)]
    compiled_ms = timed_call(compiled, target.call)
    recording = True
    call_once(compiled, target.call)
    recording = False
    report = compiled.report.to_dict()
    progress("timing each operator")
    graphs: dict[int, GraphRun] = {}
    model = target.model
    owned = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
    weights = frozenset(tensor.data_ptr() for tensor in owned)
    for graph, args in calls:
        graph_run = graphs.setdefault(id(graph), GraphRun.of(graph))
        graph_run.note_weights(args, weights)
        graph_run.add_times(args)
    runs = list(graphs.values())
    limit_to([run.node_ms for run in runs], eager_ms)
    limit_to([run.outer_ms for run in runs], compiled_ms)
    return Measured(compiled, answers, eager_ms, compiled_ms, runs, report)


def _answer(state: FixedState, compiled: CompiledModule, inputs: Inputs, expected: Any) -> Answer:
    """Runs the compiled model once, with poisoned memory for its results."""
    try:
        with compiled.poisoned():
            return Answer(expected, state.run(compiled, inputs))
    except Exception as raised:
        # Any exception is the finding: eager PyTorch has already run the same call.
        return Answer(expected, None, class_and_line(raised))


def limit_to(parts: Sequence[dict[str, float]], whole: float) -> None:
    """Scales times so that they add up to no more than the time of a whole call.

    Operators that run one by one take longer than in a call, and another load of the machine makes a difference, too.
    How the time divides is what is measured there.

    Args:
        parts: Milliseconds by name, which are changed.
        whole: Milliseconds of a call.
    """
    total = sum(sum(times.values()) for times in parts)
    if total <= whole:
        return
    for times in parts:
        for name in times:
            times[name] *= whole / total


def timed_call(model: Callable[..., Any], call: SampleCall) -> float:
    """Returns the median time of several calls on copies of the inputs, in milliseconds, after a warm-up call."""
    _timed(model, call)
    seconds: list[float] = []
    while len(seconds) < CALLS and sum(seconds) < BUDGET_SECONDS:
        seconds.append(_timed(model, call))
    return statistics.median(seconds) * 1e3


def _timed(model: Callable[..., Any], call: SampleCall) -> float:
    args, kwargs = copied(tuple(call))
    start = time.perf_counter()
    with torch.inference_mode():
        model(*args, **kwargs)
    return time.perf_counter() - start
