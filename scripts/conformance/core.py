"""The core ATen operators: their overloads, and samples of each."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.cases import Call, calls_of, function_of, op_infos, supported
from conformance.core_samples import SAMPLES
from conformance.outcome import Outcome
from conformance.run_case import run_calls

# Inference uses only the first output of these; the others are for training.
_STATISTICS_FOLLOW = frozenset(
    {
        "native_layer_norm", "native_group_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    }
)  # fmt: skip
_PER_OVERLOAD = 5
_PER_OPERATOR = 3
_KEEPS = (
    torch.Tensor, bool, int, float, str, torch.dtype, torch.device, torch.layout,
)  # fmt: skip


def overloads() -> list[str]:
    """Names of all forward overloads of torch.ops.aten that torch tags as core, such as ``aten.add.Tensor``."""
    calls = []
    # Not `dir(torch.ops.aten)`: it depends on what was looked up before.
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        packet, _, overload = name.partition(".")
        if namespace != "aten" or "_backward" in packet or not hasattr(torch.ops.aten, packet):
            continue
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if torch.Tag.core in op.tags:
            calls.append(str(op))
    return sorted(calls)


def overload_of(name: str) -> torch._ops.OpOverload:
    """The overload with this name."""
    _, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


class _Recorder(TorchDispatchMode):
    """Records calls of core overloads while eager runs: one per kind, at most `_PER_OVERLOAD` per overload."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self.found: dict[str, dict[str, Call]] = {name: {} for name in names}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name in self.found and len(self.found[name]) < _PER_OVERLOAD:
            # A memory format can't be pickled, and changes no value.
            call = Call(tuple(args), {k: v for k, v in (kwargs or {}).items() if k != "memory_format"})
            if _plain(call):
                self.found[name].setdefault(_kind(call), call.cloned())
        return func(*args, **(kwargs or {}))


def _plain(call: Call) -> bool:
    """Whether a call can be stored, and has only non-empty dense tensors and no float64 or complex types."""
    wide = {torch.float64, torch.complex64, torch.complex128, torch.complex32}
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    if not all(isinstance(leaf, _KEEPS) or leaf is None for leaf in leaves):
        return False
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if wide & {leaf for leaf in leaves if isinstance(leaf, torch.dtype)}:
        return False
    return all(t.numel() and t.layout is torch.strided and t.dtype not in wide for t in tensors)


def _kind(call: Call) -> str:
    """Identifies a kind of call; calls of one kind differ in sizes and values only."""
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return str([(x.dtype, x.dim()) if isinstance(x, torch.Tensor) else type(x).__name__ for x in leaves])


def record() -> dict[str, list[Call]]:
    """Runs op_db in eager and records the calls, in the first of `DTYPES` that each operator supports."""
    recorder = _Recorder(frozenset(overloads()))
    for name in op_infos():
        for dtype in supported(name)[:1]:
            for function, call in _runs(name, dtype):
                with recorder, torch.no_grad():
                    try:
                        function(*call.args, **call.kwargs)
                    except Exception:
                        # Eager refuses this sample: nothing to record.
                        continue
    return {name: list(calls.values()) for name, calls in recorder.found.items()}


def _runs(name: str, dtype: str) -> Iterator[tuple[Any, Call]]:
    try:
        calls = calls_of(name, dtype, _PER_OPERATOR)
    except Exception:
        # A few OpInfos need packages that are not installed to create their samples.
        return
    for call in calls:
        yield function_of(name), call


def _function(name: str) -> Callable[..., Any]:
    op = overload_of(name)
    if name.startswith("aten.sym_"):
        # The output must be a tensor; a size is none.
        return lambda x, *args: x + int(op(x, *args))
    if name.split(".")[1] in _STATISTICS_FOLLOW:
        return lambda *args, **kwargs: op(*args, **kwargs)[0]
    return op


def run(name: str, recorded: list[Call]) -> Outcome:
    """Runs one overload on its handcrafted and recorded samples."""
    op = _function(name)
    calls = [*SAMPLES.get(name, list)(), *recorded]
    if not calls:
        return Outcome("eager_refuses", ("no sample",))
    return run_calls(op, calls, values=not name.startswith(("aten.empty", "aten.new_empty")))


def save_recorded(path: str) -> None:
    """Records in this process and saves the calls for the workers."""
    torch.set_num_threads(1)
    torch.save(record(), path)
