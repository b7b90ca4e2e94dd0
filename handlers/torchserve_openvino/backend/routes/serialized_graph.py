"""Converts a lowered graph to plain JSON data for a cache entry, and back to a function.

No code of an entry is executed: a target is a name that is looked up among torch's registered operators and the few
builtins that lowered graphs use, and an argument is a literal of a known kind.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.conversion.mapped_ops import module_of
from torchserve_openvino.backend.partitioning.partition import Partitioned, RefusedNode, Subgraph
from torchserve_openvino.backend.runtime.assemble import SinglePartition
from torchserve_openvino.backend.spec import spec_of
from torchserve_openvino.cache.identity.fingerprint import fingerprint
from torchserve_openvino.cache.identity.weights_digest import tensor_digest
from torchserve_openvino.ops import fourier  # noqa: F401
from torchserve_openvino.ops.mappings import MODULES
from torchserve_openvino.ops.names import value_of
from torchserve_openvino.report.records import GraphRecord

if TYPE_CHECKING:
    from torchserve_openvino.backend.partitioning.partition import RefusedNode

# Registers this package's own operators, which a process that traces nothing needs too.

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


# --- serialization ------------------------------------------------------------------------------------------------


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


# --- deserialization ----------------------------------------------------------------------------------------------


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


def _references(value: Any) -> Iterator[int]:
    """Yields the references in encoded values."""
    if isinstance(value, list):
        for item in value:
            yield from _references(item)
    elif isinstance(value, Mapping):
        for kind, content in value.items():
            if kind == "node":
                yield content
            elif kind == "dict" and isinstance(content, Mapping):
                yield from _references(list(content.values()))
            else:
                yield from _references(content)


def _target(name: str) -> Callable[..., Any]:
    if name in _BUILTINS:
        return _BUILTINS[name]
    target: Any = torch.ops
    for part in name.split("."):
        target = getattr(target, part, None)
    if not isinstance(target, torch._ops.OpOverload):
        raise PlainGraphError(f"{name} is not an operator known to this process")
    return target


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
        self._ends = self._last_uses(plain["nodes"])

    @staticmethod
    def _last_uses(nodes: Sequence[Any]) -> list[list[int]]:
        """Returns which values each node is the last one to use; the output's stay."""
        last: dict[int, int] = {}
        for i, node in enumerate(nodes):
            for used in _references([node.get("args"), node.get("kwargs")]):
                last[used] = i
        ends: list[list[int]] = [[] for _ in nodes]
        for used, i in last.items():
            ends[i].append(used)
        return ends

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
                # As torch's own graphs do: all results of a large model at once would not fit into memory.
                for used in self._ends[i]:
                    values[used] = None
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


# --- converts the structure of a call's inputs and of its result to text, and back --------------------------------


# For these two, torch's reader would import any module that an entry names.
_IMPORTING = ("collections.defaultdict", "__enum__")


def tree_to_text(spec: Any) -> str:
    """Returns the structure as JSON text.

    Raises:
        ValueError: A container has no name in torch's pytree, or cannot be read back without importing code.
    """
    try:
        text: str = pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError) as error:
        raise ValueError(f"the structure has no text form: {error}") from error
    if text_to_tree(text) != spec:
        raise ValueError("the structure changes when it is written as text: a key that is not a string")
    return text


def text_to_tree(text: str) -> Any:
    """Returns the structure that `tree_to_text` wrote.

    Raises:
        ValueError: The text was not written by it, or names a container that this process does not know.
    """
    for name in _IMPORTING:
        if name in text:
            raise ValueError(f"the structure holds a {name.strip('_')}, which cannot be stored")
    try:
        return pytree.treespec_loads(text)
    except (NotImplementedError, TypeError, KeyError) as error:
        raise ValueError(f"the structure cannot be read: {error}") from error


# --- describes a partition and the graph around it as plain data, for the keys and entries of the cache -----------


@dataclass
class Blueprint:
    """How a graph was built, so that it can be built again from stored partitions.

    Attributes:
        keys: Key of each partition in the cache, in the order of ``partitioned.parts``.
        record: The graph's record in the report.
    """

    partitioned: Partitioned
    keys: list[str]
    record: GraphRecord = field(repr=False)

    @property
    def left_out(self) -> list[RefusedNode]:
        """Nodes that run in eager PyTorch."""
        return self.partitioned.left_out


def serialized_part(part: Subgraph) -> Plain:
    """Returns everything that decides what a partition computes, except its constants.

    Raises:
        PlainGraphError: The partition holds something without a plain form.
        TypeError: A value can't be passed to OpenVINO.
    """
    return {
        "graph": to_plain(part.graph.graph),
        "inputs": [spec_of(value_of(node)).to_plain() for node in part.arguments],
        "outputs": [spec_of(value_of(node)).to_plain() for node in part.output_nodes()],
        "attributes": {name: tensor_digest(tensor) for name, tensor in attributes(part.graph).items()},
    }


def mapped_modules(part: Subgraph) -> dict[str, str]:
    """Returns digests of a part's mapped modules without their weights, by the names of their operators.

    Raises:
        PlainGraphError: A module holds something that cannot be read.
    """
    digests: dict[str, str] = {}
    for name in sorted(part.op_counts):
        if name.startswith(f"{MODULES}."):
            known = fingerprint(module_of(name))
            if known.unknown:
                raise PlainGraphError(f"the mapped module {name} holds {known.unknown[0]}")
            digests[name] = known.code
    return digests


def attributes(graph: GraphModule) -> dict[str, torch.Tensor]:
    """Returns the tensors that are attributes of a graph.

    Raises:
        PlainGraphError: An attribute is not a tensor, but the nested graph of a higher-order operator.
    """
    tensors: dict[str, torch.Tensor] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        value: Any = getattr(graph, str(node.target), None)
        if not isinstance(value, torch.Tensor):
            raise PlainGraphError(f"the graph's attribute {node.target} is a {type(value).__name__}")
        tensors[str(node.target)] = value
    return tensors


# --- the plain-data parts of a stored call: records, fallbacks, and graphs that are built when they are needed ----


class LazyGraph:
    """A plain graph that is built when it is first needed, which is when OpenVINO fails."""

    def __init__(self, plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self._plain = dict(plain)
        self._tensors = tensors

    @functools.cached_property
    def _graph(self) -> PlainGraph:
        return PlainGraph(self._plain, {}, self._tensors)

    def __call__(self, *args: Any) -> Any:
        """Runs the graph."""
        return self._graph(*args)


def plain_single(whole: SinglePartition) -> dict[str, Any]:
    """Returns a single partition as JSON-safe data."""
    slots = [[kind, encode(value)] for kind, value in whole.slots]
    return {"part": whole.part, "pick": whole.pick, "slots": slots}


def below(tensors: Mapping[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of one graph, which are named ``GRAPH/NAME``, by ``NAME``."""
    return {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.partition("/")[0] == part}


def plain_record(record: GraphRecord) -> dict[str, Any]:
    """Returns a record as JSON-safe data, without what is specific to the process that compiled."""
    partitions = [
        {
            "name": p.name,
            "ops": p.ops,
            "op_counts": dict(p.op_counts),
            "float_layers": dict(p.float_layers),
            "builds": 0,
        }
        for p in record.partitions
    ]
    facts = dataclasses.asdict(record)
    for name in ("index", "lower_seconds"):
        del facts[name]
    decomposed = {name: {**item, "where": place_of(item["where"])} for name, item in record.decomposed.items()}
    return {**facts, "where": place_of(record.where), "decomposed": decomposed, "partitions": partitions}


def plain_fallback(item: "RefusedNode") -> dict[str, Any]:
    """Returns a refused node as a JSON-safe fallback."""
    refusal = item.refusal
    return {"kind": refusal.kind, "op": item.op, "to": "eager", "reason": refusal.reason, "where": place_of(item.where)}


def place_of(where: str) -> str:
    """Returns ``file:line`` without the folder of the user's file: each worker unpacks the archive to another one."""
    if "site-packages" in where or "dist-packages" in where:
        return where
    return where.rpartition("/")[2]
