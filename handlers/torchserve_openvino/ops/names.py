"""Operator names as the report, the YAML and OpenVINO's table spell them, and which nodes count as work."""

import functools
import linecache
import operator
import re
from typing import Any

import torch
from torch.fx import Node

_TRACE_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# Frames of this package that wrap a model, or a part of it, while it is traced.
_STAND_INS = tuple(
    f"torchserve_openvino/backend/{name}"
    for name in (
        "capture/whole.py", "compiled.py", "runners/guarded.py", "upstream/_torch_kept.py", "torchscript/scalar_ops.py",
    )
)  # fmt: skip
# Name of the source of a TorchScript module in Python (`backend.torchscript`); a comment has each node's own line.
TORCHSCRIPT_SUFFIX = ".torchscript"

# Operators that only alias a tensor: autograd's bookkeeping, not work.
RENAMES = frozenset({"aten.detach.default", "aten.alias.default"})
# Operators that read the same memory as another type: torch makes such a view, which costs nothing.
_REINTERPRETS = frozenset({"aten.view_as_real.default", "aten.view_as_complex.default"})
# Checks of sizes that are known only when the model runs; they stay in eager PyTorch.
_CHECKS = frozenset({"aten._assert_scalar.default"})
# Key in the ``meta`` of a node that counts as no work: a view made for the graph's output, or for a node that stays in
# eager PyTorch (`backend.partitioning.views`).
HANDED_OUT = "openvino_handed_out"


def op_name(target: Any) -> str:
    """Returns ``aten.relu.default`` for an overload, ``operator.mul`` or the like for a Python callable."""
    if isinstance(target, torch._ops.OpOverload):
        return _overload_name(target)
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", str(target))
    return f"{module.lstrip('_')}.{name}" if module else name


# Cached: each compiled model looks up the names of all operators that have a decomposition, and their rules.
_overload_name = functools.lru_cache(maxsize=8192)(str)


def is_made_of_others(op: torch._ops.OpOverload) -> bool:
    """Returns whether an overload is composite: its only implementation calls other operators."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def packets(names: str) -> frozenset[str]:
    """Returns ``aten.view`` and so on for bare names of ATen operators, separated by whitespace."""
    return frozenset(f"aten.{name}" for name in names.split())


def value_of(node: Node) -> Any:
    """Returns the fake value that tracing stored on a node: FakeTensor, SymInt, tuple of them, or None."""
    return node.meta.get("val")


def arguments_of(node: Node) -> dict[str, Any]:
    """Returns the arguments of an operator's node, by their names in the schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns all tensors in a (nested) fake value."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def first_input(node: Node) -> torch.Tensor | None:
    """Returns the fake tensor of a node's first input."""
    tensors = tensors_of(value_of(node.all_input_nodes[0])) if node.all_input_nodes else []
    return tensors[0] if tensors else None


def is_empty(value: Any) -> bool:
    """Returns True if a value is a tensor that has no elements whatever the symbolic sizes."""
    return isinstance(value, torch.Tensor) and any(isinstance(size, int) and size == 0 for size in value.shape)


def is_symbolic_scalar(node: Node) -> bool:
    """Returns whether a node computes a size (SymInt, int) instead of a tensor."""
    return isinstance(value_of(node), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def does_work(node: Node) -> bool:
    """Returns True if a node counts as an op in the report: a ``call_function`` that computes or moves elements."""
    if node.op != "call_function" or node.target is operator.getitem or HANDED_OUT in node.meta:
        return False
    results = tensors_of(value_of(node))
    if results and all(map(is_empty, results)):
        return False
    return not is_symbolic_scalar(node) and op_name(node.target) not in RENAMES | _REINTERPRETS | _CHECKS


def where_of(node: Node) -> str:
    """Returns ``file:line`` of the user's code behind a node: the innermost frame outside torch; empty if unknown."""
    frames = _TRACE_LINE.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not is_stand_in(frame[0])]
    own = [(path, line) for path, line, _ in frames if "/torch/" not in path]
    chosen = own[-1] if own else (frames[-1][:2] if frames else None)
    return source_line(*chosen) if chosen else ""


def source_line(path: str, line: int | str) -> str:
    """Returns ``file:line`` of a frame: for code that was written from TorchScript, of the code that was scripted."""
    if path.endswith(TORCHSCRIPT_SUFFIX):
        _, comment, own = linecache.getline(path, int(line)).rstrip().rpartition("  # ")
        if comment:
            return own
    return f"{path}:{line}"


def is_stand_in(path: str) -> bool:
    """Returns True for a file of this package that wraps a model, or a part of it, while it is traced."""
    return path.endswith(_STAND_INS)
