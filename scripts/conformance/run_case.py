"""Runs an operator's samples through `tov.compile` and compares them with eager.

All samples share one graph, which costs one compilation. If that is inconclusive (a wrong value, an exception, a failed
conversion), each sample is compiled by itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from conformance.cases import Call
from conformance.compare import difference
from conformance.outcome import Outcome, judge, merge, short
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.instrumentation import Instrumentation, Observation
from torchserve_openvino.ops import does_work, op_name

# Several processes share the machine; small graphs must reach OpenVINO.
_OPTIONS = {"min_partition_us": 0, "config": {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}}
# With only these fallbacks, one graph for all samples is as conclusive as one for each.
_CLEAR = frozenset({"unsupported_op", "disabled_op"})


class _Decomposed:
    """Detects whether a graph has operators from decompositions, and random operators."""

    def __init__(self) -> None:
        self.seen = False
        self.random = False

    def __call__(self, observation: Observation) -> None:
        for node in observation.lowered.graph.nodes:
            if not does_work(node):
                continue
            original = node.meta.get("original_aten")
            self.seen |= original is not None and op_name(original) != op_name(node.target)
            tags = getattr(node.target, "tags", ())
            self.random |= torch.Tag.nondeterministic_seeded in tags


Settle = Callable[[Call, Any], Any]
# Compile arguments of each mode.
MODES: dict[str, dict[str, Any]] = {
    "static": {},
    "dynamic": {"dynamic": True},
    "openvino_ts": {"backend": "openvino_ts"},
    "export": {"backend": "export"},
}


class _AsModule(torch.nn.Module):
    """A function as a module, which torch.export requires."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = [run]

    def forward(self, samples: Any) -> Any:
        return self.run[0](samples)


def run_calls(
    function: Callable[..., Any],
    calls: Sequence[Call],
    values: bool = True,
    settle: Settle | None = None,
    mode: str = "static",
) -> Outcome:
    """Compiles and runs samples, and judges the result.

    Args:
        function: The operator.
        calls: Its samples.
        values: False if eager's own values are arbitrary.
        settle: Removes from an answer what torch leaves open.
        mode: One of `MODES`.
    """
    usable, expected = [], []
    for call in calls:
        try:
            expected.append(_seeded(lambda call=call: function(*call.args, **call.kwargs), call))  # type: ignore[misc]
        except Exception:
            # A sample that eager itself refuses says nothing about OpenVINO.
            continue
        usable.append(call)
    if not usable:
        return Outcome("eager_refuses")
    if len(usable) > 1:
        together = _run(function, usable, expected, values, settle, mode)
        if together is not None:
            return together
    single = [
        _run(function, [call], [answer], values, settle, mode, last=True)
        for call, answer in zip(usable, expected, strict=True)
    ]
    return merge(outcome for outcome in single if outcome is not None)


def _tracer_fails(run: Callable[..., Any], calls: Sequence[Call], mode: str) -> bool:
    """Whether torch fails without OpenVINO: Dynamo with the eager backend, or torch.export's own program."""
    torch._dynamo.reset()
    samples = [(c.args, c.kwargs) for c in map(Call.cloned, calls)]
    try:
        with torch.no_grad():
            if mode == "export":
                torch.export.export(_AsModule(run).eval(), (samples,), strict=False).module()(samples)
                return False
            torch.compile(run, backend="eager", dynamic=mode == "dynamic")(samples)
    except Exception:
        return True
    return False


def _traced_wrong(
    run: Callable[..., Any], calls: Sequence[Call], expected: list[Any], values: bool, settle: Settle | None, mode: str
) -> bool:
    """Whether torch.compile's own tracing, without OpenVINO, gives a wrong answer."""
    if mode == "export":
        return False
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(run, backend="aot_eager", dynamic=mode == "dynamic")
        got = compiled([(c.args, c.kwargs) for c in map(Call.cloned, calls)])
    if settle is not None:
        got = [settle(call, answer) for call, answer in zip(calls, got, strict=True)]
    return bool(difference(got, expected, values))


# Eager rounds or overflows on the way; in these types it decides.
_WIDER = {torch.float16: torch.float32, torch.float32: torch.float64}


def _as_exact(function: Callable[..., Any], calls: Sequence[Call], got: Any) -> bool:
    """Whether an answer is that of a wider type, where eager's own rounds or overflows on the way."""
    kinds = {leaf.dtype for leaf in pytree.tree_leaves(got) if isinstance(leaf, torch.Tensor)}
    narrow = next((kind for kind in _WIDER if kind in kinds), None)
    if narrow is None:
        return False

    def widened(call: Call) -> Call:
        values = call.cloned()
        return Call(
            *pytree.tree_map_only(torch.Tensor, lambda t: _to(t, narrow, _WIDER[narrow]), (values.args, values.kwargs))
        )

    try:
        with torch.no_grad():
            exact = [function(*wide.args, **wide.kwargs) for wide in map(widened, calls)]
    except Exception:
        # Not every operator runs in another type (an explicit dtype, for one): eager's own decides then.
        return False
    rounded = pytree.tree_map_only(torch.Tensor, lambda t: _to(t, _WIDER[narrow], narrow), exact)
    return not difference(got, rounded)


def _to(tensor: torch.Tensor, kind: torch.dtype, other: torch.dtype) -> torch.Tensor:
    return tensor.to(other) if tensor.dtype is kind else tensor


def _seeded(run: Callable[[], Any], call: Call) -> Any:
    kept = call.cloned()
    torch.manual_seed(0)
    with torch.no_grad():
        result = run()
    # What the operator wrote to its inputs must not reach the compiled run.
    object.__setattr__(call, "args", kept.args)
    object.__setattr__(call, "kwargs", kept.kwargs)
    return result


def _run(
    function: Callable[..., Any],
    calls: Sequence[Call],
    expected: Sequence[Any],
    values: bool,
    settle: Settle | None,
    mode: str,
    last: bool = False,
) -> Outcome | None:
    """Runs samples in one graph; None if they must run one by one."""
    torch._dynamo.reset()
    observer = _Decomposed()

    def run(samples: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        return [function(*args, **kwargs) for args, kwargs in samples]

    model = _AsModule(run).eval() if mode == "export" else run
    compiled = compile_with(
        model, CompileSpec(options=_OPTIONS, instrumentation=Instrumentation(observe=observer), **MODES[mode])
    )
    cloned = [call.cloned() for call in calls]
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            got = compiled([(call.args, call.kwargs) for call in cloned])
    except Exception as error:
        if not last:
            return None
        said = f"{type(error).__name__}: {error}"
        if _tracer_fails(run, calls, mode):
            who = "torch.export" if mode == "export" else "Dynamo"
            return Outcome("not_traceable", (f"{who} itself fails: {short('', said)}",))
        return Outcome("WRONG", (f"{said} for {calls[0]}"[:600],))
    if settle is not None:
        got = [settle(call, answer) for call, answer in zip(calls, got, strict=True)]
        expected = [settle(call, answer) for call, answer in zip(calls, expected, strict=True)]
    values = values and not observer.random
    wrong = difference(got, list(expected), values)
    if wrong and _as_exact(function, calls, got):
        wrong = ""
    if wrong and last and _traced_wrong(run, calls, list(expected), values, settle, mode):
        return Outcome("not_traceable", (f"torch.compile itself (aot_eager) answers otherwise: {wrong}",))
    if wrong:
        return Outcome("WRONG", (f"{wrong} for {calls[0]}",)) if last else None
    kinds = {fallback.kind for fallback in compiled.report.fallbacks}
    return judge(compiled.report, observer.seen) if last or kinds <= _CLEAR else None
