"""Finds the operators that make a model's answer wrong or its compilation fail, by leaving them in eager PyTorch."""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from torchserve_openvino.config import ResolvedOptions
from torchserve_openvino.doctor.bisecting.experiments import Experiments, NodeInfo, TrialOutcome
from torchserve_openvino.files.json_text import with_names
from torchserve_openvino.ops.mappings import MODULES, registered
from torchserve_openvino.ops.rule_registry import rule_of
from torchserve_openvino.serving.verification.judge import Judge

if TYPE_CHECKING:
    from torchserve_openvino.doctor.target import SampleCall

# --- delta debugging: finds a minimal subset for which a test is true ---------------------------------------------
# The algorithm is ddmin of A. Zeller and R. Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE
# Transactions on Software Engineering 28(2), 2002, section 3.2, over subsets in a fixed order.


Item = TypeVar("Item", bound=Hashable)
Test = Callable[[tuple[Item, ...]], bool]


@dataclass(frozen=True)
class Minimal(Generic[Item]):
    """Result of `minimize`.

    Attributes:
        items: The subset, in the order of the input. The test is true for it.
        tests: How often the test ran; repeated subsets do not count.
        proven: Whether every item is shown to be needed; False where ``max_tests`` was reached first.
    """

    items: tuple[Item, ...]
    tests: int
    proven: bool


class _OutOfTestsError(Exception):
    """The budget is spent."""


class _Memo(Generic[Item]):
    """Tests each subset once, and remembers the smallest one that passed."""

    def __init__(self, items: tuple[Item, ...], test: Test[Item], max_tests: int) -> None:
        self._test = test
        self._max = max_tests
        self._results: dict[frozenset[Item], bool] = {}
        self.best: tuple[Item, ...] | None = None
        self.items = items

    @property
    def tests(self) -> int:
        return len(self._results)

    def __call__(self, subset: Sequence[Item]) -> bool:
        key = frozenset(subset)
        if key not in self._results:
            if len(self._results) >= self._max:
                raise _OutOfTestsError
            ordered = tuple(item for item in self.items if item in key)
            self._results[key] = passed = self._test(ordered)
            if passed and (self.best is None or len(ordered) < len(self.best)):
                self.best = ordered
        return self._results[key]


def minimize(
    items: Sequence[Item], test: Test[Item], *, singles: int | None = None, max_tests: int = 1000
) -> Minimal[Item] | None:
    """Finds a 1-minimal subset for which ``test`` is true: without any one of its items it is false.

    Args:
        items: Without repeats, the most suspicious ones first.
        test: Called with a subset in the order of ``items``; must return the same each time. It need not be monotone.
        singles: How many items are tried alone before the bisection begins; None means all. Each costs one test, and
            usually a single item is guilty.
        max_tests: After this many tests, the smallest subset that has passed is returned.

    Returns:
        The subset; None where the test is false even for all items (or ``max_tests`` is reached before any passes).
    """
    run = _Memo(tuple(dict.fromkeys(items)), test, max_tests)
    try:
        if run(()):
            return Minimal((), run.tests, True)
        if not run(run.items):
            return None
        for item in run.items[:singles]:
            if run((item,)):
                return Minimal((item,), run.tests, True)
        return Minimal(_ddmin(run.items, run), run.tests, True)
    except _OutOfTestsError:
        return None if run.best is None else Minimal(run.best, run.tests, False)


def _ddmin(items: tuple[Item, ...], test: Test[Item]) -> tuple[Item, ...]:
    chunks = 2
    while len(items) >= 2:
        parts = _split(items, min(chunks, len(items)))
        smaller = next((part for part in parts if test(part)), None)
        if smaller is not None:
            items, chunks = smaller, 2
            continue
        rest = (tuple(item for item in items if item not in part) for part in parts)
        smaller = next((part for part in rest if test(part)), None)
        if smaller is not None:
            items, chunks = smaller, max(chunks - 1, 2)
            continue
        if len(parts) == len(items):
            break
        chunks = min(len(items), chunks * 2)
    return items


def _split(items: tuple[Item, ...], parts: int) -> list[tuple[Item, ...]]:
    """Splits into ``parts`` consecutive runs whose lengths differ by at most one."""
    bounds = [len(items) * i // parts for i in range(parts + 1)]
    return [items[start:stop] for start, stop in pairwise(bounds)]


# --- finds the operators that make a model's answer wrong or its compilation fail, by leaving them in eager PyTorch


Kind = Literal[
    "wrong_answer",
    "conversion_failed",
    "compile_failed",
    "compile_died",
    "runtime_failed",
    "not_repaired",
    "nothing_wrong",
]
Progress = Callable[[str], None]

# How many operators are tried one at a time before the bisection: usually one of the most suspicious is to blame.
_SINGLES = 4
_SHOWN_NODES = 10


@dataclass(frozen=True)
class Culprits:
    """What a bisection found.

    Attributes:
        kind: What was wrong; ``not_repaired`` where leaving operators out does not help, ``nothing_wrong`` where the
            answer was right and nothing failed.
        problem: What was seen, in one line.
        ops: A minimal set of operators that repairs the model when left in eager PyTorch, as overload names.
        nodes: A minimal set of their nodes that does so.
        candidates: How many nodes of ``ops`` there are.
        difference_before: Largest absolute difference from eager PyTorch before the repair; infinite where the model
            gave no answer, or NaN where eager does not.
        difference_after: The same with ``ops`` disabled; None where no operators were found.
        coverage_before: Share of the operators on OpenVINO, 0..1.
        coverage_after: The same with ``ops`` disabled.
        confirmed: Whether the model was compiled once more with ``ops`` disabled, and was right.
        proven: Whether the sets were shown to be minimal; False where ``max_tests`` was reached first.
        tests: Number of compilations.
        seconds: Wall-clock time of the search.
        cause: For ``not_repaired``, what is to blame instead.
    """

    kind: Kind
    problem: str = ""
    ops: tuple[str, ...] = ()
    nodes: tuple[NodeInfo, ...] = ()
    candidates: int = 0
    difference_before: float = 0.0
    difference_after: float | None = None
    coverage_before: float = 0.0
    coverage_after: float | None = None
    confirmed: bool = False
    proven: bool = True
    tests: int = 0
    seconds: float = 0.0
    cause: str = ""

    @property
    def disabled_ops(self) -> list[str]:
        """Names for the option ``disabled_ops``; a mapped module has none."""
        # The operator that stands for a mapped module cannot be named in a YAML.
        return [op for op in self.ops if not op.startswith(f"{MODULES}.")]

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, JSON-safe: a difference that is not finite is text, such as ``inf``."""
        plain = asdict(self) | {"disabled_ops": self.disabled_ops, "explanation": self.explanation()}
        plain["nodes"] = [asdict(node) | {"inputs": list(node.inputs)} for node in self.nodes]
        plain["ops"] = list(self.ops)
        for name in ("difference_before", "difference_after"):
            if plain[name] is not None:
                plain[name] = with_names(plain[name])
        return plain

    def explanation(self) -> str:
        """Explains in sentences what is wrong, where, how it was found, and what to do."""
        cost = f"{self.tests} compilations, {self.seconds:.1f} s"
        if self.kind == "nothing_wrong":
            return (
                "Nothing is wrong: the answer equals eager PyTorch's (largest difference "
                f"{self.difference_before:.3g}), and nothing failed ({cost})."
            )
        if self.kind == "not_repaired":
            return f"{_sentence(self.problem)} No operator is to blame: {self.cause} ({cost})."
        lines = [_sentence(self.problem), self._who(), self._how(cost), self._what_to_do()]
        return "\n".join(line for line in lines if line)

    def _who(self) -> str:
        many = len(self.ops) > 1
        lines = [f"{'These operators are' if many else 'This operator is'} to blame: {', '.join(self.ops)}."]
        if self.candidates > len(self.nodes):
            them = "them" if many else "it"
            lines.append(f"Leaving out {len(self.nodes)} of the {self.candidates} nodes with {them} is enough:")
        for node in self.nodes[:_SHOWN_NODES]:
            source = " in ".join(part for part in (node.where, node.module) if part) or "an unknown line"
            lines.append(f"  {node.name} ({node.op} of {', '.join(node.inputs) or 'no tensor'}) at {source}")
        if len(self.nodes) > _SHOWN_NODES:
            lines.append(f"  and {len(self.nodes) - _SHOWN_NODES} more")
        return "\n".join(lines)

    def _how(self, cost: str) -> str:
        tested = f"Found in {cost}, each with other operators left in eager PyTorch"
        if not self.proven:
            return f"{tested}; the limit was reached, so some of them may not be to blame."
        if len(self.ops) > 1:
            return f"{tested}: leaving out all of them repairs the model, leaving out fewer does not."
        return f"{tested}: leaving it out repairs the model."

    def _what_to_do(self) -> str:
        lines = []
        if len(self.disabled_ops) < len(self.ops):
            lines.append("The mapping of that module is wrong: fix it, or remove it from op_mappings.")
        for op in self.disabled_ops:
            if (convert := registered().find(op)) is not None:
                lines.append(
                    f"{op} is converted by your own mapping {convert.__module__}.{convert.__qualname__}: fix it or "
                    "remove it from op_mappings; disabling the operator helps until then."
                )
        if self.disabled_ops:
            lines.append(self._disable())
        if not self.confirmed:
            lines.append("All of this was tried together and did not repair the model: please report it.")
        return "\n".join(lines)

    def _disable(self) -> str:
        text = (
            f"Write disabled_ops: [{', '.join(self.disabled_ops)}] into the options of pt2: eager PyTorch runs "
            f"{'them' if len(self.disabled_ops) > 1 else 'it'}, coverage goes from {self.coverage_before:.1%} to "
            f"{self.coverage_after or 0.0:.1%}"
        )
        if self.kind == "wrong_answer":
            text += f", and the largest difference from {self.difference_before:.3g} to {self.difference_after:.3g}"
        return f"{text}. This was tried and gives the right answer." if self.confirmed else f"{text}."


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def find_guilty(
    model: Callable[..., Any],
    call: "SampleCall",
    options: ResolvedOptions,
    *,
    backend: str = "openvino",
    judge: Judge | None = None,
    dynamic: bool | None = False,
    max_tests: int = 200,
    progress: Progress = lambda message: None,
) -> Culprits:
    """Finds a minimal set of operators, then of their nodes, that makes a model right when left in eager PyTorch.

    The caches are not used, and `torch.compiler.reset` is called after each compilation: other models that this
    process compiled are compiled again at their next call.

    Args:
        model: In evaluation mode, on the CPU.
        call: Its inputs: ``args`` and ``kwargs``.
        options: Those that it is served with.
        backend: ``openvino``, ``openvino_ts`` or ``export``.
        judge: Judges the answers; None for the tolerance of the precision that the options give.
        dynamic: As for ``torch.compile``.
        max_tests: Limit on the compilations of each of the two searches; at the limit, the best set found so far is
            the result.
        progress: Called with a description of each step.

    Raises:
        Exception: Whatever the model itself raises in eager PyTorch.
    """
    start = time.perf_counter()
    progress("running eager PyTorch twice")
    experiments = Experiments(model, call, options, backend=backend, judge=judge, dynamic=dynamic)
    search = _Search(experiments, max_tests, progress)

    def result(kind: Kind, **facts: Any) -> Culprits:
        return Culprits(kind, tests=experiments.count, seconds=time.perf_counter() - start, **facts)

    if experiments.unsteady:
        return result(
            "not_repaired",
            problem=f"eager PyTorch gives a different answer each time: {experiments.unsteady}",
            cause="the model draws random numbers of its own, or keeps state outside of its modules",
        )
    progress("compiling the model as it is")
    before = experiments.run()
    seen = {"difference_before": before.max_abs, "coverage_before": before.coverage, "problem": before.problem}
    if before.good:
        return result("nothing_wrong", **seen)
    ops = search.over_ops(before)
    if ops is None:
        return result("not_repaired", cause=_no_operator(experiments, before), **seen)
    candidates = [node for node in before.nodes if node.op in ops.items]
    nodes = search.over_nodes(candidates)
    progress(f"compiling with disabled_ops: {', '.join(ops.items)}")
    after = experiments.run(disabled_ops=ops.items)
    return result(
        _kind(before),
        **seen,
        ops=ops.items,
        nodes=nodes.items,
        candidates=len(candidates),
        difference_after=after.max_abs,
        coverage_after=after.coverage,
        confirmed=after.good,
        proven=ops.proven and nodes.proven,
    )


class _Search:
    def __init__(self, experiments: Experiments, max_tests: int, progress: Progress) -> None:
        self._experiments = experiments
        self._max_tests = max_tests
        self._progress = progress

    def over_ops(self, before: TrialOutcome) -> Minimal[str] | None:
        """Returns the operators; None where the model is not right even with all of them in eager PyTorch."""
        ops = _by_suspicion(before)

        def repairs(subset: tuple[str, ...]) -> bool:
            return bool(subset) and self._right(lambda node: node.op in subset, len(subset), len(ops), "operators")

        # Failures may name more operators than that: each of them is worth a test of its own.
        singles = max(_SINGLES, len(before.suspects))
        return minimize(ops, repairs, singles=singles, max_tests=self._max_tests)

    def over_nodes(self, candidates: list[NodeInfo]) -> Minimal[NodeInfo]:
        """Returns the guilty nodes among ``candidates``, all nodes of the guilty operators."""

        def repairs(subset: tuple[NodeInfo, ...]) -> bool:
            keys = {node.key for node in subset}
            if len(keys) in {0, len(candidates)}:
                # Both results are known: the model as it is was wrong, and the operators' search left out all of them.
                return bool(keys)
            return self._right(lambda node: node.key in keys, len(keys), len(candidates), "nodes")

        minimal = minimize(candidates, repairs, singles=_SINGLES, max_tests=self._max_tests)
        return minimal if minimal is not None else Minimal(tuple(candidates), 0, False)

    def _right(self, leave_out: Callable[[NodeInfo], bool], some: int, of: int, what: str) -> bool:
        outcome = self._experiments.run(leave_out)
        verdict = "right" if outcome.good else "still wrong"
        self._progress(f"test {self._experiments.count}: {some} of {of} {what} left out, {verdict}")
        return outcome.good


def _kind(outcome: TrialOutcome) -> Kind:
    if outcome.difference:
        return "wrong_answer"
    if outcome.error:
        return "compile_failed" if outcome.dynamo else "runtime_failed"
    kinds: Iterable[Any] = (failure.kind for failure in outcome.failures)
    return next(iter(kinds))


def _by_suspicion(outcome: TrialOutcome) -> list[str]:
    """Sorts the operators: named by a failure first, then added by the user or this package, then rare ones."""
    counts = Counter(node.op for node in outcome.nodes)
    mapped = registered()

    def suspicion(op: str) -> tuple[bool, bool, int]:
        known = op.startswith("aten.") and not rule_of(op).verified and not mapped.covers(op)
        return op not in outcome.suspects, known, counts[op]

    return sorted(counts, key=suspicion)


def _no_operator(experiments: Experiments, before: TrialOutcome) -> str:
    """Returns what changes the answer although every operator runs in eager PyTorch."""
    if not before.nodes:
        return "no graph of the model was captured, so that there is no operator to leave out"
    if tracing := experiments.run_without_openvino():
        return (
            f"torch.compile changes the answer before OpenVINO sees the graph ({tracing}); compare with "
            'torch.compile(model, backend="aot_eager")'
        )
    return (
        "the problem remains with every operator in eager PyTorch: the model keeps state outside of its modules, or "
        "draws random numbers in another order when compiled, or a decomposition of this package is wrong"
    )
