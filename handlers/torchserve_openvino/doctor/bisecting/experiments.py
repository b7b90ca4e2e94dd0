"""Experiments: the model is compiled with some nodes left in eager PyTorch, run, and compared with eager PyTorch."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from torchserve_openvino.backend import compile
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.instrumentation import Instrumentation
from torchserve_openvino.backend.runtime.compare import largest_difference
from torchserve_openvino.config import ResolvedOptions
from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.doctor.describe import described
from torchserve_openvino.doctor.fixed_state import FixedState, call_once, differences
from torchserve_openvino.errors import class_and_line
from torchserve_openvino.ops import does_work, op_name, where_of
from torchserve_openvino.ops.names import tensors_of, value_of
from torchserve_openvino.report import Fallback
from torchserve_openvino.serving.verification.judge import Judge

if TYPE_CHECKING:
    from torchserve_openvino.doctor.target import SampleCall

FAILURES = ("conversion_failed", "compile_failed", "compile_died", "runtime_failed")


@dataclass(frozen=True)
class NodeInfo:
    """A node of a lowered graph.

    Attributes:
        graph: Digest of the graph that it is in; the same in each compilation.
        name: Its name there; unique within ``graph``.
        op: ``aten.relu.default`` or the like.
        where: ``file:line`` in the user's model; empty if unknown.
        module: Path of the module that called it, ``layers.3.act``; empty if unknown.
        inputs: Its input tensors, such as ``float32[1, 64, 56, 56]``.
    """

    graph: str
    name: str
    op: str
    where: str
    module: str
    inputs: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the node within the model."""
        return self.graph, self.name


@dataclass(frozen=True)
class TrialOutcome:
    """Result of one experiment.

    Attributes:
        difference: What is wrong with the answer, in words; empty where it equals eager's.
        max_abs: Largest absolute difference from eager; infinite where there is no answer to compare.
        error: The exception that the compiled model raised, ``Type: message``; empty for none.
        failures: Operators and partitions that OpenVINO could not convert, compile or run.
        nodes: Nodes that could run on OpenVINO, left out or not, in the order of the graphs.
        suspects: Operators that a failure names, or that are in a partition that failed.
        coverage: Share of the operators that ran on OpenVINO, 0..1.
        dynamo: Whether Dynamo raised the exception while compiling, rather than the model while running.
    """

    difference: str
    max_abs: float
    error: str
    failures: tuple[Fallback, ...]
    nodes: tuple[NodeInfo, ...]
    suspects: frozenset[str]
    coverage: float
    dynamo: bool = False

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.difference or self.error or self.failures)

    @property
    def problem(self) -> str:
        """What is wrong, in one line."""
        reasons = [f"{failure.op} ({failure.kind}): {first_line(failure.reason)}" for failure in self.failures]
        return "; ".join(part for part in (self.difference, self.error, *reasons) if part)


class Experiments:
    """Runs a model in eager PyTorch and on OpenVINO, from the same state, on one input and on its values reordered.

    A model that draws random numbers or keeps state can be compared too (`FixedState`).

    Args:
        model: In evaluation mode, on the CPU.
        call: Its inputs; never changed.
        options: Those that it is served with; the caches are not used.
        backend: ``openvino``, ``openvino_ts`` or ``export``.
        judge: Judges the answers; None for the tolerance of the effective precision.
        dynamic: As for ``torch.compile``.

    Attributes:
        count: How many compilations ran.
        unsteady: How two eager runs differ, in words; empty where they do not.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        call: "SampleCall",
        options: ResolvedOptions,
        *,
        backend: str = "openvino",
        judge: Judge | None = None,
        dynamic: bool | None = False,
    ) -> None:
        self.count = 0
        self._model = model
        self._backend = backend
        self._judge = judge
        self._dynamic = dynamic
        # The compiler died: it would die of other parts of the graph too.
        self._cautious = False
        plain = replace(options.options, model_caching=False, cache_dir=None, fallback_to="eager")
        # Leaving a node out splits its partition; the pieces must not stay in eager because they are small.
        plain = replace(plain, min_partition_us=0.0)
        plain = replace(plain, config={k: v for k, v in plain.config.items() if k != "CACHE_DIR"})
        self._options = replace(options, options=plain)
        call_once(model, call)
        self._state = FixedState(model)
        # Calls, each with eager's answer.
        self._checks = self._state.eager_answers((call.args, call.kwargs))
        first, expected = self._checks[0]
        self.unsteady = differences(self._judge_in("f32"), self._state.run(model, first), expected)

    def run(
        self, leave_out: Callable[[NodeInfo], bool] = lambda node: False, disabled_ops: Sequence[str] = ()
    ) -> TrialOutcome:
        """Compiles the model anew and runs it on each set of values.

        Args:
            leave_out: Which nodes to keep in eager PyTorch.
            disabled_ops: Names to add to the option of the same name.
        """
        self.count += 1
        seen: dict[tuple[str, str], NodeInfo] = {}
        digests: dict[Graph, str] = {}

        def probe(node: Node) -> str | None:
            if not does_work(node):
                return None
            if node.graph not in digests:
                digests[node.graph] = _digest(node.graph)
            info = _info(node, digests[node.graph])
            seen[info.key] = info
            return "left out by a diagnosis" if leave_out(info) else None

        names = dict.fromkeys((*self._options.options.disabled_ops, *disabled_ops))
        options = replace(self._options, options=replace(self._options.options, disabled_ops=tuple(names)))
        compiled = compile_with(
            self._model,
            CompileSpec(
                dynamic=self._dynamic,
                backend=self._backend,
                resolved=options,
                instrumentation=Instrumentation(leave_out=probe),
                cautious=self._cautious,
            ),
        )
        with _quiet():
            try:
                with compiled.poisoned():
                    answers = [self._state.run(compiled, call) for call, _ in self._checks]
                error = ""
                dynamo = False
            except Exception as raised:
                # Any exception is the finding: eager PyTorch has already run the same call.
                answers, error = [], class_and_line(raised)
                dynamo = type(raised).__module__.startswith("torch._dynamo")
            finally:
                # Otherwise each compilation would stay in memory with its graphs.
                torch.compiler.reset()
        report = compiled.report.to_dict()
        judge = self._judge_in(report["config"]["effective_precision"])
        failures = tuple(fallback for fallback in compiled.report.fallbacks if fallback.kind in FAILURES)
        self._cautious |= any(failure.kind == "compile_died" for failure in failures)
        return TrialOutcome(
            difference=self._difference(answers, judge),
            max_abs=float("inf") if error else max(map(largest_difference, answers, self._expected)),
            error=error,
            failures=failures,
            nodes=tuple(seen.values()),
            suspects=_suspects(failures, report["graphs"]),
            coverage=report["summary"]["coverage"],
            dynamo=dynamo,
        )

    def run_without_openvino(self) -> str:
        """Returns how Dynamo and AOTAutograd alone change the answer, in words; empty where they do not.

        Empty for the backend ``export`` too, which captures the model without Dynamo.
        """
        if self._backend == "export":
            return ""
        compiled = compile(self._model, dynamic=self._dynamic, backend="aot_eager")
        try:
            answers = [self._state.run(compiled, call) for call, _ in self._checks]
            return self._difference(answers, self._judge_in("f32"))
        except Exception as raised:
            return class_and_line(raised)
        finally:
            torch.compiler.reset()

    @property
    def _expected(self) -> list[Any]:
        return [expected for _, expected in self._checks]

    def _judge_in(self, precision: str) -> Judge:
        return self._judge or Judge(precision, VerifySection())

    def _difference(self, answers: Sequence[Any], judge: Judge) -> str:
        """Returns the first difference from eager's answers, in words; empty where there is none."""
        pairs = zip(answers, self._expected, strict=False)
        return next(filter(None, (differences(judge, got, expected) for got, expected in pairs)), "")


def first_line(text: str) -> str:
    """Returns the first line that is not blank."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the backend's warnings about nodes that an experiment leaves out on purpose."""
    backend = logging.getLogger("torchserve_openvino.backend")
    level = backend.level
    backend.setLevel(logging.ERROR)
    try:
        yield
    finally:
        backend.setLevel(level)


def _digest(graph: Graph) -> str:
    """Identifies a graph across compilations; node names alone are often the same in several graphs of a model."""
    rows = [(n.name, op_name(n.target), where_of(n), _module_of(n)) for n in graph.nodes if n.op == "call_function"]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:12]


def _module_of(node: Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("L['self']").removeprefix("L['fn']").lstrip(".")


def _info(node: Node, digest: str) -> NodeInfo:
    tensors = [t for source in node.all_input_nodes for t in tensors_of(value_of(source))]
    inputs = map(described, tensors)
    return NodeInfo(digest, node.name, op_name(node.target), where_of(node), _module_of(node), tuple(inputs))


def _suspects(failures: Sequence[Fallback], graphs: Sequence[dict[str, Any]]) -> frozenset[str]:
    """Returns the operators that the failures name; for a failure that names a partition, all of its operators."""
    names = {failure.op for failure in failures}
    for graph in graphs:
        for part in graph["partitions"]:
            if f"graph {graph['index']} / {part['name']}" in names:
                names |= part["op_counts"].keys()
    return frozenset(names)
