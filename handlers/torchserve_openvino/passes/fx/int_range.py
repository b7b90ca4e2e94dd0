"""Limits on integer inputs within which OpenVINO computes a partition's integers as torch does.

OpenVINO's CPU and GPU plugins treat int64 as int32, and the CPU plugin computes most integer operators in float32, some
of them only when they are fused with others (tests/contract pins it): exact up to 2^24, silently rounded beyond. Each
integer input of a partition therefore gets a limit, the largest for which interval arithmetic over the nodes stays
exact. Each call checks its inputs; one that exceeds a limit runs in eager and is counted. If no limit is small enough,
the operator is left to eager PyTorch; operators that multiply integers repeatedly (`ops.support`) never get here.

An integer that is cast from a float is limited in the same way, but the graph itself checks it (`checks.py`). Symbolic
sizes are limited as well, also for the digits of sums over dimensions of these sizes (`ops.support`). The smaller they
are, the larger the values may be (a sum of n values), so there are limits for each of `_SIZES`, and each call takes
those of its own sizes.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from torchserve_openvino.config.op_names import packet_name
from torchserve_openvino.errors import InexactValueError
from torchserve_openvino.ops.integers import Operands, largest, magnitude, most
from torchserve_openvino.ops.names import op_name, tensors_of, value_of
from torchserve_openvino.ops.rule_registry import Movement, rule_of
from torchserve_openvino.ops.support import keeps_digits
from torchserve_openvino.passes.pass_context import Bounds, IntegerLimits

INT32_MAX = 2**31 - 1
EXACT_IN_FLOAT32 = 2**24
_SIZES = (2**24, 2**22, 2**20, 2**18, 2**17, 2**16, 2**14, 2**12, 2**10)
# The largest power of 2 below which a float that is cast to an integer is sure to fit into 32 bits.
_FROM_FLOAT = 2**30
_HIGHEST = {
    torch.int64: INT32_MAX,
    torch.int32: 2**31,
    torch.int16: 2**15,
    torch.uint8: 255,
    torch.int8: 128,
    torch.bool: 1,
}
_CHECKED = frozenset({torch.int64, torch.int32})
# Types of arguments that hold values; sizes and positions have others.
_VALUES = frozenset({"Tensor", "number", "Optional[number]"})

# These only move data: exact in 32 bits.
_MOVES = frozenset({Movement.REARRANGES, Movement.LOOKS_UP, Movement.FILLS})


class _Violation(NamedTuple):
    node: Node
    value: int
    most: int


def input_limits(
    graph: Graph, constants: Mapping[str, torch.Tensor], known: Mapping[str, Bounds]
) -> list[IntegerLimits]:
    """Returns the widest limits for which interval arithmetic stays exact, for growing symbolic sizes.

    The limits of floats that are cast to integers are the same for all sizes.

    Args:
        graph: The subgraph.
        constants: Maps the name of a ``get_attr`` node, or of a placeholder that a constant replaces, to its value.
        known: Bounds that inputs already have because they are indices.

    Raises:
        InexactValueError: No limit keeps the integers exact. The message names the operator.
    """
    fixed = {name: _largest(tensor) for name, tensor in constants.items() if tensor.dtype in _CHECKED}
    for name, value in fixed.items():
        if value > INT32_MAX + 1:
            raise InexactValueError(f"int64 constant {name} holds {value}: OpenVINO computes int64 in 32 bits")
    start = {}
    for node in graph.find_nodes(op="placeholder"):
        dtype = next((tensor.dtype for tensor in tensors_of(value_of(node))), None)
        if node.name not in fixed and dtype in _CHECKED:
            low, high, *_ = known.get(node.name, Bounds(-_HIGHEST[dtype], _HIGHEST[dtype]))
            start[node.name] = min(max(-low, high), _HIGHEST[dtype])
    start |= {node.name: _FROM_FLOAT for node in graph.nodes if is_cast_from_float(node)}
    numbers = _numbers(graph)
    nodes = [node for node in graph.nodes if node in numbers or any(map(_integers, (node, *node.all_input_nodes)))]
    descending: list[IntegerLimits] = []
    error: InexactValueError
    for size in _sizes(graph):
        try:
            values = _lowered(nodes, fixed, start, size)
        except InexactValueError as exact:
            error = exact
            continue
        if not descending or values != descending[-1].values:
            descending.append(IntegerLimits(size, values))
    if not descending:
        raise error
    return _with_one_cast(descending[::-1], {node.name for node in nodes if is_cast_from_float(node)})


def _numbers(graph: Graph) -> set[Node]:
    """Returns the numbers that a graph computes from its numbers and sizes, and uses as values.

    Sizes of tensors stay far below 2^31 elements, but a product of a number with itself does not.
    """
    shapes: list[Any] = [
        size
        for node in graph.find_nodes(op="placeholder")
        for tensor in tensors_of(value_of(node))
        for size in tensor.shape
    ]
    sizes = {size.node.expr for size in shapes if isinstance(size, torch.SymInt)}
    waiting = [node for node in graph.nodes if _is_computed(node) and _is_value(node, sizes)]
    numbers = set(waiting)
    while waiting:
        sources = [source for source in waiting.pop().all_input_nodes if _is_computed(source) and source not in numbers]
        numbers.update(sources)
        waiting += sources
    return numbers


def _is_computed(node: Node) -> bool:
    number = node.op == "call_function" and isinstance(value_of(node), torch.SymInt)
    return number and not isinstance(node.target, torch._ops.OpOverload)


def _is_value(node: Node, sizes: Set[Any]) -> bool:
    """Returns True if a number is computed with, or returned and not made of sizes alone."""
    if any(user.op == "output" for user in node.users) and not value_of(node).node.expr.free_symbols <= sizes:
        return True
    return any(
        str(argument.type) in _VALUES
        for user in node.users
        if isinstance(user.target, torch._ops.OpOverload)
        for argument, value in zip(user.target._schema.arguments, user.args, strict=False)
        if value is node
    )


def _with_one_cast(limits: list[IntegerLimits], casts: Set[str]) -> list[IntegerLimits]:
    """Leaves the limits that agree on casts, which the graph checks whatever its sizes: those that forbid least."""
    if not casts:
        return limits

    def tightest(limits: IntegerLimits) -> int:
        return min([limits.size, *(bounds.high for bounds in limits.values.values())])

    def of_casts(limits: IntegerLimits) -> dict[str, Bounds]:
        return {name: bounds for name, bounds in limits.values.items() if name in casts}

    best = max(limits, key=tightest)
    return [limit for limit in limits if of_casts(limit) == of_casts(best)]


def _sizes(graph: Graph) -> list[int]:
    """Returns the limits of symbolic sizes to try, the largest first: those that keep the digits of all sums."""
    allowed = list(_SIZES if _is_dynamic(graph) else _SIZES[:1])
    for node in graph.nodes:
        allowed = [size for size in allowed if keeps_digits(node, size)]
        if not allowed:
            raise InexactValueError(f"{op_name(node.target)} over {_SIZES[-1]} values and more may lose digits")
    return allowed


def _is_dynamic(graph: Graph) -> bool:
    values = [value_of(node) for node in graph.nodes]
    sizes = [size for value in values for tensor in tensors_of(value) for size in tensor.shape]
    return any(isinstance(size, torch.SymInt) for size in (*values, *sizes))


def _lowered(nodes: Sequence[Node], fixed: Mapping[str, int], start: Mapping[str, int], size: int) -> dict[str, Bounds]:
    limits, causes = dict(start), dict[str, str]()
    while (violation := _first_violation(nodes, {**fixed, **limits}, size)) is not None:
        _lower(violation, limits, causes)
    # An int32 input that may hold its type's whole range needs no bounds.
    return {name: Bounds(-most, most, causes.get(name, "")) for name, most in limits.items() if most <= INT32_MAX}


def _lower(violation: _Violation, limits: dict[str, int], causes: dict[str, str]) -> None:
    """Halves the largest limits among the inputs that a violating value is computed from."""
    name = op_name(violation.node.target)
    sources = [source for source in _sources(violation.node, limits) if limits.get(source, 1) > 1]
    if not sources:
        limit = "32 bits" if violation.most > EXACT_IN_FLOAT32 else "2^24"
        raise InexactValueError(
            f"{name} on integers up to {violation.value} may exceed {limit}, within which OpenVINO computes it exactly"
        )
    largest = max(limits[source] for source in sources)
    for source in sources:
        if limits[source] == largest:
            # Rounded to a power of 2, for round numbers in messages.
            limits[source] = 2 ** ((largest - 1).bit_length() - 1)
            causes[source] = name


def is_cast_from_float(node: Node) -> bool:
    """Checks whether a node casts floats to int64 or int32."""
    if node.op != "call_function" or op_name(node.target) != "aten._to_copy.default" or not _integers(node):
        return False
    return any(tensor.is_floating_point() for tensor in tensors_of(value_of(node.all_input_nodes[0])))


def _sources(node: Node, limited: Mapping[str, int]) -> set[str]:
    """Returns the names of the placeholders and limited nodes that a node's integers are computed from."""
    names, seen, waiting = set(), {node}, [node]
    while waiting:
        current = waiting.pop()
        if current.op == "placeholder" or current.name in limited:
            names.add(current.name)
        for source in current.all_input_nodes:
            if source not in seen and _integers(source):
                seen.add(source)
                waiting.append(source)
    return names


def _largest(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    low, high = torch.aminmax(tensor)
    # Of +-2^31, only the negative one has 32 bits.
    return max(int(high) + (int(high) > INT32_MAX), -int(low))


def _integers(node: Node) -> bool:
    """Checks whether a node holds integers that need limits: int64 or int32."""
    return any(tensor.dtype in _CHECKED for tensor in tensors_of(value_of(node)))


def _first_violation(nodes: Sequence[Node], inputs: Mapping[str, int], size: int) -> _Violation | None:
    """Returns the first node whose integers exceed what it computes exactly, with all inputs at their limits."""
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
    value = value_of(node)
    if isinstance(value, torch.SymInt):
        return most(value, size)
    return max((_HIGHEST.get(tensor.dtype, 0) for tensor in tensors_of(value)), default=size)


def _exposed(node: Node, operands: list[int], result: int) -> tuple[int, int]:
    """Returns the largest integer for which a node is exact, and the largest that it processes."""
    if _is_computed(node):
        return INT32_MAX, result
    name = op_name(node.target)
    movement = rule_of(name).movement
    if not _integers(node):
        # For a float result, torch rounds the integers as well; for a boolean, no nonzero integer rounds to 0.
        if movement is not Movement.COMPARES:
            return EXACT_IN_FLOAT32, 0
        sides = [*operands, *(magnitude(arg) for arg in node.args if not isinstance(arg, Node))]
        # Both sides are rounded, which matters only if both are large; 2^24 itself may be a larger value, rounded.
        return EXACT_IN_FLOAT32 - 1, min(sides) if len(sides) > 1 else 0
    moves = movement in _MOVES or packet_name(name) == "aten.sym_size"
    if moves or not isinstance(node.target, torch._ops.OpOverload):
        return INT32_MAX + 1, result
    return EXACT_IN_FLOAT32, max([result, *operands])


def _bound(node: Node, bounds: Mapping[Node, int], size: int) -> int:
    """Returns the largest absolute value of an integer node."""
    by_source = {
        source: bounds[source] if source in bounds else _highest(source, size) for source in node.all_input_nodes
    }
    return (rule_of(op_name(node.target)).integers or largest)(Operands(node, by_source, size))
