"""How large integer inputs may be so that OpenVINO computes a partition's integers as torch does.

OpenVINO's CPU and GPU plugins take int64 for int32, and the CPU plugin computes most integer operators in float32, some
of them only once they are fused with others (tests/contract pins it): exact up to 2^24, then silently rounded. Each
integer input of a partition therefore gets a limit, the largest for which interval arithmetic over the nodes stays
exact. Each call checks its inputs against it; beyond, the call runs in eager, counted. What no limit can hold is left
to eager PyTorch; operators that multiply integers over and over (`ops.support`) never come here.

An integer that is cast from a float gets a limit in the same way, which the graph itself checks (`checks.py`); a
symbolic size is taken to be below a limit as well, the largest of `_SIZES` that does, which each call checks.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from torchserve_openvino.backend.spec import Bounds
from torchserve_openvino.errors import IntegerRangeError
from torchserve_openvino.ops.movement import COMPARES, FILLS, HANDS_ON, LOOKS_UP
from torchserve_openvino.ops.names import arguments_of, op_name, packet_name, tensors_of, value_of

INT32_MAX = 2**31 - 1
EXACT_IN_FLOAT32 = 2**24
_SIZES = (2**24, 2**16, 2**14, 2**12, 2**10)
# The largest power of 2 below which a float that becomes an integer is sure to fit into 32 bits.
_FROM_FLOAT = 2**30
_HIGHEST = {torch.int64: INT32_MAX, torch.int32: 2**31, torch.uint8: 255, torch.int8: 128, torch.bool: 1}
_CHECKED = frozenset({torch.int64, torch.int32})

# Data is moved, not computed with: exact in 32 bits.
_MOVES = HANDS_ON | LOOKS_UP | FILLS | {"aten.sym_size"}
_SUMS = frozenset({"aten.add", "aten.sub", "aten.rsub"})
_UNIONS = frozenset({"aten.bitwise_or", "aten.bitwise_xor", "aten.bitwise_not"})
# Operator to the argument whose values are added to those of the first.
_ADDS_UP = {"aten.scatter_add": 3, "aten.scatter_reduce": 3, "aten.index_add": 3, "aten.index_put": 2}
# The end of a slice may be as large as Python's numbers.
_TAKE_AN_END = frozenset({"aten.slice_scatter", "aten.slice_copy"})
_SELECTS = frozenset({"aten.gather", "aten.index", "aten.index_select", "aten.select", "aten.slice"})
_POSITIONS = frozenset({"aten.argmax", "aten.argmin", "aten.argsort"})
_VALUES_AND_POSITIONS = frozenset({"aten.sort", "aten.topk", "aten.max", "aten.min"})


class Limits(NamedTuple):
    """What keeps a subgraph's integers exact.

    Attributes:
        values: Of each int64 or int32 input, and of each float that becomes one, by the node's name; none where any
            value will do.
        size: The largest that a symbolic size may be.
    """

    values: dict[str, Bounds]
    size: int


class _Violation(NamedTuple):
    node: Node
    value: int
    most: int


def input_limits(graph: GraphModule, constants: Mapping[str, torch.Tensor], known: Mapping[str, Bounds]) -> Limits:
    """The widest limits for which interval arithmetic stays exact.

    Args:
        graph: The subgraph.
        constants: Placeholder name to the tensor that is frozen there.
        known: Bounds that inputs have already, as indices.

    Raises:
        IntegerRangeError: No limit keeps its integers exact. The message names the operator.
    """
    fixed = {name: _largest(tensor) for name, tensor in constants.items() if tensor.dtype in _CHECKED}
    for name, value in fixed.items():
        if value > INT32_MAX + 1:
            raise IntegerRangeError(f"int64 constant {name} holds {value}: OpenVINO computes int64 in 32 bits")
    start = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        dtype = next((tensor.dtype for tensor in tensors_of(value_of(node))), None)
        if node.name not in fixed and dtype in _CHECKED:
            low, high, *_ = known.get(node.name, Bounds(-_HIGHEST[dtype], _HIGHEST[dtype]))
            start[node.name] = min(max(-low, high), _HIGHEST[dtype])
    start |= {node.name: _FROM_FLOAT for node in graph.graph.nodes if is_cast_from_float(node)}
    nodes = [node for node in graph.graph.nodes if any(map(_integers, (node, *node.all_input_nodes)))]
    for size in _SIZES:
        try:
            return Limits(_lowered(nodes, fixed, start, size), size)
        except IntegerRangeError:
            if size == _SIZES[-1]:
                raise
    raise AssertionError("unreachable")


def _lowered(nodes: Sequence[Node], fixed: Mapping[str, int], start: Mapping[str, int], size: int) -> dict[str, Bounds]:
    limits, causes = dict(start), dict[str, str]()
    while (violation := _first_violation(nodes, {**fixed, **limits}, size)) is not None:
        _lower(violation, limits, causes)
    # No int32 exceeds its own type.
    return {name: Bounds(-most, most, causes.get(name, "")) for name, most in limits.items() if most <= INT32_MAX}


def _lower(violation: _Violation, limits: dict[str, int], causes: dict[str, str]) -> None:
    """Halves the largest limits among the inputs that the value comes from."""
    name = op_name(violation.node.target)
    sources = [source for source in _sources(violation.node, limits) if limits.get(source, 1) > 1]
    if not sources:
        limit = "32 bits" if violation.most > EXACT_IN_FLOAT32 else "2^24"
        raise IntegerRangeError(
            f"{name} on integers up to {violation.value} may exceed {limit}, within which OpenVINO computes it exactly"
        )
    largest = max(limits[source] for source in sources)
    for source in sources:
        if limits[source] == largest:
            # To a power of 2, so that messages say round numbers.
            limits[source] = 2 ** ((largest - 1).bit_length() - 1)
            causes[source] = name


def is_cast_from_float(node: Node) -> bool:
    """Whether a node makes int64 or int32 of floats."""
    if node.op != "call_function" or op_name(node.target) != "aten._to_copy.default" or not _integers(node):
        return False
    return any(tensor.is_floating_point() for tensor in tensors_of(value_of(node.all_input_nodes[0])))


def _sources(node: Node, limited: Mapping[str, int]) -> set[str]:
    """Names of the nodes with a limit that a node's integers come from."""
    found, seen, waiting = set(), {node}, [node]
    while waiting:
        current = waiting.pop()
        if current.op == "placeholder" or current.name in limited:
            found.add(current.name)
        for source in current.all_input_nodes:
            if source not in seen and _integers(source):
                seen.add(source)
                waiting.append(source)
    return found


def _largest(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    values = tensor.detach().numpy()
    return max(int(values.max()), -int(values.min()))


def _integers(node: Node) -> bool:
    """Whether a node holds integers that count: int64 or int32."""
    return any(tensor.dtype in _CHECKED for tensor in tensors_of(value_of(node)))


def _first_violation(nodes: Sequence[Node], inputs: Mapping[str, int], size: int) -> _Violation | None:
    """The first node that meets larger integers than it is exact for, where the inputs are as large as they may be."""
    bounds: dict[Node, int] = {}
    for node in nodes:
        if node.name in inputs:
            bounds[node] = inputs[node.name]
        elif node.op == "call_function":
            operands = [bounds[source] for source in node.all_input_nodes if _integers(source)]
            bounds[node] = _bound(node, bounds, size) if _integers(node) else _highest(node, size)
            most, value = _exposed(node, operands, bounds[node])
            if value > most:
                return _Violation(node, value, most)
    return None


def _highest(node: Node, size: int) -> int:
    return max((_HIGHEST.get(tensor.dtype, 0) for tensor in tensors_of(value_of(node))), default=size)


def _exposed(node: Node, operands: list[int], result: int) -> tuple[int, int]:
    """Up to where a node is exact, and the largest integer that it meets."""
    name = packet_name(op_name(node.target))
    if not _integers(node):
        # A float: torch rounds the integers to it as well. A truth value: an integer does not round to 0.
        if name not in COMPARES:
            return EXACT_IN_FLOAT32, 0
        sides = [*operands, *(_scalar(arg) for arg in node.args if not isinstance(arg, Node))]
        # Both sides are rounded, which shows only where both are large; 2^24 itself may be a larger value that was.
        return EXACT_IN_FLOAT32 - 1, min(sides) if len(sides) > 1 else 0
    if name in _MOVES or not isinstance(node.target, torch._ops.OpOverload):
        return INT32_MAX + 1, result
    return EXACT_IN_FLOAT32, max([result, *operands])


def _bound(node: Node, bounds: Mapping[Node, int], size: int) -> int:
    """The largest absolute value of an integer node."""
    name = packet_name(op_name(node.target))
    sources = node.all_input_nodes
    each = {source: bounds[source] if source in bounds else _highest(source, size) for source in sources}
    values = [each[arg] if isinstance(arg, Node) else _scalar(arg) for arg in node.args] or [0]
    from_float = any(t.is_floating_point() for source in sources[:1] for t in tensors_of(value_of(source)))
    if name in _POSITIONS or (name in _VALUES_AND_POSITIONS and from_float):
        return _along(node, sources[0], size)
    if name in _SUMS:
        alpha = node.kwargs.get("alpha", 1)
        return values[0] + values[1] * abs(int(alpha if isinstance(alpha, (int, float)) else 1))
    if name == "aten.mul":
        return values[0] * values[1]
    if name in {"aten.sum", "aten.cumsum"}:
        return values[0] * max(1, _numel(sources[0], size, node.args[1] if len(node.args) > 1 else None))
    if name in _ADDS_UP:
        added = node.args[_ADDS_UP[name]]
        return values[0] + (each[added] * _numel(added, size) if isinstance(added, Node) else 0)
    if name in _UNIONS:
        return sum(values) + 1
    if name in _SELECTS:
        return values[0]
    # Everything else selects, moves or shrinks: no result exceeds the inputs, a fill value and the positions.
    plain = [value for value in (*node.args, *node.kwargs.values()) if not isinstance(value, Node)]
    scalars = [] if name in _TAKE_AN_END else [_scalar(value) for value in plain]
    positions = [_along(node, sources[0], size)] if name in _VALUES_AND_POSITIONS else []
    return max([*each.values(), *scalars, *positions], default=0)


def _along(node: Node, source: Node, size: int) -> int:
    """How many positions an operator may name: along its dimension, or in the whole tensor."""
    dim = arguments_of(node).get("dim", None if packet_name(op_name(node.target)) in _POSITIONS else -1)
    return _numel(source, size, dim)


def _numel(node: Node, size: int, dims: object = None) -> int:
    """Elements of a node's tensor, over some of its dimensions."""
    shape = next((tensor.shape for tensor in tensors_of(value_of(node))), torch.Size())
    chosen = [dims] if isinstance(dims, int) else dims
    over: Sequence[Any] = (
        [shape[d] for d in chosen] if isinstance(chosen, (list, tuple)) and chosen and shape else shape
    )
    return math.prod(each if isinstance(each, int) else size for each in over)


def _scalar(value: object) -> int:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return abs(int(value))
    return 0
