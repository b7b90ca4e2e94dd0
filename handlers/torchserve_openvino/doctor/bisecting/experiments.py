"""Experiments: the model is compiled with some nodes left in eager PyTorch, run, and compared with eager PyTorch."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from torchserve_openvino.backend import compile
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.instrumentation import Instrumentation
from torchserve_openvino.backend.runtime.compare import difference, largest_difference, reordered
from torchserve_openvino.config import ResolvedOptions
from torchserve_openvino.doctor.describe import described
from torchserve_openvino.errors import class_and_line
from torchserve_openvino.ops import does_work, op_name, where_of
from torchserve_openvino.ops.names import tensors_of, value_of
from torchserve_openvino.report import Fallback

if TYPE_CHECKING:
    from torchserve_openvino.doctor.target import SampleCall

logger = logging.getLogger(__name__)

FAILURES = ("conversion_failed", "compile_failed", "compile_died", "runtime_failed")
_SEED = 0


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

    The random generator is seeded and the model's buffers are restored before each run, so that a model that draws
    random numbers or updates a buffer can be compared too.

    Args:
        model: In evaluation mode, on the CPU.
        call: Its inputs; never changed.
        options: Those that it is served with; the caches are not used.
        tolerance: Largest absolute difference, or the name of a precision; None for that of the effective precision.
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
        tolerance: float | str | None = None,
        dynamic: bool | None = False,
    ) -> None:
        self.count = 0
        self._model = model
        self._dynamic = dynamic
        # The compiler died: it would die of other parts of the graph too.
        self._cautious = False
        plain = replace(options.options, model_caching=False, cache_dir=None, fallback_to="eager")
        # Leaving a node out splits its partition; the pieces must not stay in eager because they are small.
        plain = replace(plain, min_partition_us=0.0)
        plain = replace(plain, config={k: v for k, v in plain.config.items() if k != "CACHE_DIR"})
        self._options = replace(options, options=plain)
        self._max_abs = tolerance if isinstance(tolerance, float | int) else None
        self._precision = tolerance if isinstance(tolerance, str) else ""
        self._buffers = dict(model.named_buffers()) if isinstance(model, torch.nn.Module) else {}
        self._buffers = {name: tensor.clone() for name, tensor in self._buffers.items()}
        first = (call.args, call.kwargs)
        expected = self._run(model, first)
        # Calls, each with eager's answer.
        self._checks = [(first, expected)]
        self.unsteady = difference(self._run(model, first), expected, self._precision or "f32", self._max_abs)
        # A value wrongly treated as constant shows only with other values, which not every model accepts.
        other = reordered(first)
        if other is not None:
            try:
                self._checks.append((other, self._run(model, other)))
            except Exception as raised:
                logger.info("Compared on one set of values; eager refuses the other: %s", raised)

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
                resolved=options,
                instrumentation=Instrumentation(leave_out=probe),
                cautious=self._cautious,
            ),
        )
        with _quiet():
            try:
                with compiled.poisoned():
                    answers = [self._run(compiled, call) for call, _ in self._checks]
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
        precision = self._precision or report["config"]["effective_precision"]
        failures = tuple(fallback for fallback in compiled.report.fallbacks if fallback.kind in FAILURES)
        self._cautious |= any(failure.kind == "compile_died" for failure in failures)
        return TrialOutcome(
            difference=self._difference(answers, precision),
            max_abs=float("inf") if error else max(map(largest_difference, answers, self._expected)),
            error=error,
            failures=failures,
            nodes=tuple(seen.values()),
            suspects=_suspects(failures, report["graphs"]),
            coverage=report["summary"]["coverage"],
            dynamo=dynamo,
        )

    def run_without_openvino(self) -> str:
        """Returns how Dynamo and AOTAutograd alone change the answer, in words; empty where they do not."""
        compiled = compile(self._model, dynamic=self._dynamic, backend="aot_eager")
        try:
            answers = [self._run(compiled, call) for call, _ in self._checks]
            return self._difference(answers, self._precision or "f32")
        except Exception as raised:
            return class_and_line(raised)
        finally:
            torch.compiler.reset()

    @property
    def _expected(self) -> list[Any]:
        return [expected for _, expected in self._checks]

    def _difference(self, answers: Sequence[Any], precision: str) -> str:
        """Returns the first difference from eager's answers, in words; empty where there is none."""
        pairs = zip(answers, self._expected, strict=False)
        return next(filter(None, (difference(a, b, precision, self._max_abs) for a, b in pairs)), "")

    def _run(self, model: Callable[..., Any], call: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, call)
        with torch.random.fork_rng(devices=[]), torch.inference_mode():
            torch.manual_seed(_SEED)
            self._restore()
            try:
                answer = model(*args, **kwargs)
                # An output may be a view of memory that a later run writes to, such as a buffer.
                return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, answer)
            finally:
                self._restore()

    def _restore(self) -> None:
        for name, saved in self._buffers.items():
            assert isinstance(self._model, torch.nn.Module)
            path, _, leaf = name.rpartition(".")
            owner = self._model.get_submodule(path)
            now = getattr(owner, leaf, None)
            if isinstance(now, torch.Tensor) and now.shape == saved.shape and now.dtype == saved.dtype:
                if not torch.equal(now, saved):
                    now.copy_(saved)
            else:
                setattr(owner, leaf, saved.clone())


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
