"""Converts a lowered graph to plain JSON data for a cache entry, and back to a function.

No code of an entry is executed: a target is a name that is looked up among torch's registered operators and the few
builtins that lowered graphs use, and an argument is a literal of a known kind.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

# Registers this package's own operators, which a process that traces nothing needs too.
from torchserve_openvino.ops import fourier  # noqa: F401

Plain = dict[str, Any]

_LITERALS: dict[str, Mapping[str, Any]] = {
    "dtype": {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)},
    "layout": {str(v): v for v in vars(torch).values() if isinstance(v, torch.layout)},
    "memory_format": {str(v): v for v in vars(torch).values() if isinstance(v, torch.memory_format)},
}
# The second line computes symbolic sizes.
_BUILTINS = {"getitem": operator.getitem} | {
    f.__name__: f for f in (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg)
}


class PlainGraphError(TypeError):
    """A graph or an entry holds something that has no plain form."""


# --- to plain data ----------------------------------------------------------------------------------------------


def to_plain(graph: Any) -> Plain:
    """Returns a ``torch.fx.Graph`` as JSON-safe data: placeholders; attributes, operators and parts by name.

    Raises:
        PlainGraphError: A target or an argument has no plain form (a symbolic size outside a node, a Python function).
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    return {"nodes": [_node(node, position) for node in graph.nodes]}


def _node(node: Any, position: Mapping[Any, int]) -> Plain:
    if node.op == "placeholder":
        return {"op": "placeholder"}
    if node.op == "output":
        return {"op": "output", "args": encode(node.args[0], position)}
    if node.op == "get_attr":
        return {"op": "attribute", "name": str(node.target)}
    args = {"args": encode(tuple(node.args), position), "kwargs": encode(dict(node.kwargs), position)}
    if node.op == "call_module":
        return {"op": "part", "name": str(node.target), **args}
    return {"op": "call", "name": _target_name(node.target), **args}


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    for name, function in _BUILTINS.items():
        if target is function:
            return name
    raise PlainGraphError(f"{target} is not a registered operator")


def encode(value: Any, position: Mapping[Any, int] | None = None) -> Any:
    """Returns a literal argument as JSON-safe data; a node in ``position`` as a reference.

    Raises:
        PlainGraphError: The value has no plain form.
    """
    if type(value) is float and not math.isfinite(value):
        # JSON has no infinity, which attention masks contain.
        return {"float": repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if position is not None and value.__hash__ is not None and value in position:
        return {"node": position[value]}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [encode(item, position) for item in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item, position) for key, item in value.items()}}
    if isinstance(value, slice):
        return {"slice": [encode(item, position) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, known in _LITERALS.items():
        if str(value) in known and known[str(value)] is value:
            return {kind: str(value)}
    raise PlainGraphError(f"{value!r} of type {type(value).__name__} has no plain form")


# --- and back ---------------------------------------------------------------------------------------------------


def decode(value: Any, values: Sequence[Any] = ()) -> Any:
    """Returns the value that `encode` was given; references are looked up in ``values``.

    Raises:
        PlainGraphError: The data was not made by `encode`.
    """
    if not isinstance(value, Mapping):
        if isinstance(value, list):
            raise PlainGraphError("a bare list is not an encoded value")
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return values[content]
    if kind == "list":
        return [decode(item, values) for item in content]
    if kind == "tuple":
        return tuple(decode(item, values) for item in content)
    if kind == "dict" and isinstance(content, Mapping):
        return {str(key): decode(item, values) for key, item in content.items()}
    if kind == "slice":
        return slice(*(decode(item, values) for item in content))
    if kind == "size":
        return torch.Size(content)
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(*(decode(part) for part in content))
    if kind == "device":
        return torch.device(content)
    if kind in _LITERALS and content in _LITERALS[kind]:
        return _LITERALS[kind][content]
    raise PlainGraphError(f"an unknown kind of argument: {kind}")


def _target(name: str) -> Callable[..., Any]:
    if name in _BUILTINS:
        return _BUILTINS[name]
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise PlainGraphError(f"{name} is not an operator known to this process")
    return found


class PlainGraph:
    """Runs a plain graph, node by node.

    Args:
        plain: The result of `to_plain`.
        parts: Functions that ``part`` nodes call, by name.
        attributes: Constant tensors, by name.

    Raises:
        PlainGraphError: The graph names an operator, a part or an attribute that does not exist.
    """

    def __init__(
        self, plain: Plain, parts: Mapping[str, Callable[..., Any]], attributes: Mapping[str, torch.Tensor]
    ) -> None:
        self._steps: list[tuple[Callable[..., Any] | None, Any, Any]] = []
        self._output: Any = None
        self._start: dict[int, torch.Tensor] = {}
        self._placeholders: list[int] = []
        for i, node in enumerate(plain["nodes"]):
            step: Callable[..., Any] | None = None
            if node["op"] == "placeholder":
                self._placeholders.append(i)
            elif node["op"] == "attribute":
                self._start[i] = _known(attributes, node["name"], "constant")
            elif node["op"] == "part":
                step = _known(parts, node["name"], "part")
            elif node["op"] == "call":
                step = _target(node["name"])
            else:
                self._output = node["args"]
            self._steps.append((step, node.get("args"), node.get("kwargs")))

    def __call__(self, *args: Any) -> Any:
        """Runs the graph on all its inputs, in order."""
        values: list[Any] = [None] * len(self._steps)
        for i, value in zip(self._placeholders, args, strict=True):
            values[i] = value
        for i, tensor in self._start.items():
            values[i] = tensor
        for i, (step, step_args, step_kwargs) in enumerate(self._steps):
            if step is not None:
                values[i] = step(*decode(step_args, values), **decode(step_kwargs, values))
        return decode(self._output, values)


def _known(table: Mapping[str, Any], name: str, kind: str) -> Any:
    if name not in table:
        raise PlainGraphError(f"the {kind} {name} is missing")
    return table[name]


def draws_random_numbers(name: str) -> bool:
    """Checks whether an operator returns different values each time."""
    try:
        target = _target(name)
    except PlainGraphError:
        return False
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
