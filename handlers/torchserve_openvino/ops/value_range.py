"""Value ranges of the integers in a graph, by interval arithmetic over its nodes.

A range is derived only from the graph itself, its constants, and the bounds that each call checks for its inputs. None
stands for "not known", which costs a check at run time but never makes a result wrong.
"""

import math
import operator
from collections.abc import Callable, Mapping

import torch
from torch.fx import Graph, Node

from torchserve_openvino.ops.names import arguments_of, op_name, tensors_of, value_of
from torchserve_openvino.ops.rule_registry import NARROW_INTEGERS, Movement, rule_of

Range = tuple[int, int]


class ValueRanges:
    """The value ranges of one graph's nodes.

    Args:
        graph: A partition's graph.
        inputs: Ranges that each call checks, for placeholders and integers cast from floats, by the node's name.
        constants: Real tensors behind placeholders and ``get_attr`` nodes, by the node's name.
    """

    def __init__(self, graph: Graph, inputs: Mapping[str, Range], constants: Mapping[str, torch.Tensor]) -> None:
        self._found: dict[Node, Range | None] = {}
        self._inputs = inputs
        self._constants = constants
        # In graph order, so that no look-up recurses deeply.
        for node in graph.nodes:
            self._found[node] = self._of(node)

    def of(self, value: object) -> Range | None:
        """Returns the least and largest value of a node or a Python number; None if they are not known."""
        if isinstance(value, Node):
            if value not in self._found:
                # Added to the graph after construction.
                self._found[value] = self._of(value)
            return self._found[value]
        if isinstance(value, bool) or not isinstance(value, int):
            return (int(value), int(value)) if isinstance(value, bool) else None
        return value, value

    def _of(self, node: Node) -> Range | None:
        if node.name in self._constants:
            return _of_tensor(self._constants[node.name])
        if node.name in self._inputs:
            low, high = self._inputs[node.name]
            return low, high
        dtype = next((tensor.dtype for tensor in tensors_of(value_of(node))), None)
        if dtype is torch.bool:
            return 0, 1
        if node.op != "call_function":
            limits = torch.iinfo(dtype) if dtype in NARROW_INTEGERS else None
            return (limits.min, limits.max) if limits is not None else None
        if node.target is operator.getitem:
            return self._of_item(node)
        rule = rule_of(op_name(node.target))
        if rule.movement in {Movement.REARRANGES, Movement.LOOKS_UP}:
            return self._of_moved(node, dtype)
        return rule.range(self, node) if rule.range is not None else None

    def _of_item(self, node: Node) -> Range | None:
        source, index = node.args[0], node.args[1]
        if not isinstance(source, Node):
            return None
        rule = rule_of(op_name(source.target))
        if rule.item_ranges and isinstance(index, int):
            return rule.item_ranges[index](self, source)
        return self._found.get(source) if rule.movement is Movement.REARRANGES else None

    def _of_moved(self, node: Node, dtype: torch.dtype | None) -> Range | None:
        if dtype is None and not isinstance(value_of(node), (list, tuple)):
            return None
        first = node.args[0]
        sources = list(first) if isinstance(first, (list, tuple)) else [first]
        bounds = _union([self.of(source) for source in sources])
        if op_name(node.target) != "aten._to_copy.default" or bounds is None:
            return bounds
        # A narrower type would wrap around.
        limits = torch.iinfo(dtype) if dtype is not None and not dtype.is_floating_point else None
        return bounds if limits is not None and limits.min <= bounds[0] and bounds[1] <= limits.max else None


RangeRule = Callable[[ValueRanges, Node], Range | None]


def _of_tensor(tensor: torch.Tensor) -> Range | None:
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        return None
    low, high = torch.aminmax(tensor.to(torch.int64))
    return int(low), int(high)


def _union(ranges: list[Range | None]) -> Range | None:
    known = [interval for interval in ranges if interval is not None]
    return (min(r[0] for r in known), max(r[1] for r in known)) if len(known) == len(ranges) and known else None


# --- operators ----------------------------------------------------------------------------------------------------


def stated(value: int) -> RangeRule:
    """Makes the rule of an operator that fills with a number."""
    return lambda ranges, node: (value, value)


def of_argument(position: int) -> RangeRule:
    """Makes the rule of an operator that returns an argument's values."""
    return lambda ranges, node: ranges.of(node.args[position])


def of_arguments(*positions: int) -> RangeRule:
    """Makes the rule of an operator that returns values of several arguments."""

    def together(ranges: ValueRanges, node: Node) -> Range | None:
        if len(node.args) <= max(positions):
            return None
        return _union([ranges.of(node.args[position]) for position in positions])

    return together


def of_both(combine: Callable[[Range, Range], Range]) -> RangeRule:
    """Makes the rule of an operator with two operands, from a function of their ranges."""

    def combined(ranges: ValueRanges, node: Node) -> Range | None:
        if len(node.args) < 2 or arguments_of(node).get("alpha", 1) != 1:
            return None
        x, y = ranges.of(node.args[0]), ranges.of(node.args[1])
        return None if x is None or y is None else combine(x, y)

    return combined


truth: RangeRule = lambda ranges, node: (0, 1)  # noqa: E731
sum_of_two = of_both(lambda x, y: (x[0] + y[0], x[1] + y[1]))
difference_of_two = of_both(lambda x, y: (x[0] - y[1], x[1] - y[0]))
difference_from_second = of_both(lambda x, y: (y[0] - x[1], y[1] - x[0]))
least_of_two = of_both(lambda x, y: (min(x[0], y[0]), min(x[1], y[1])))
largest_of_two = of_both(lambda x, y: (max(x[0], y[0]), max(x[1], y[1])))


def _product(x: Range, y: Range) -> Range:
    ends = [a * b for a in x for b in y]
    return min(ends), max(ends)


product_of_two = of_both(_product)


def _bits(x: Range, y: Range) -> Range:
    """Returns the range of as many bits as both operands have; a sign is kept if either has one."""
    most = 2 ** max(max(high, -low - 1).bit_length() for low, high in (x, y))
    return 0 if min(x[0], y[0]) >= 0 else -most, most - 1


bits_of_two = of_both(_bits)


def positions(default: int | None) -> RangeRule:
    """Makes the rule of an operator that returns positions along ``dim``.

    Args:
        default: The dimension if none is given; None stands for all elements.
    """

    def of_places(ranges: ValueRanges, node: Node) -> Range | None:
        source = node.args[0]
        shape = next((t.shape for t in tensors_of(value_of(source))), None) if isinstance(source, Node) else None
        if not shape:
            return 0, 0
        dim = arguments_of(node).get("dim", default)
        size = shape.numel() if dim is None else shape[dim] if isinstance(dim, int) else None
        return (0, size - 1) if isinstance(size, int) else None

    return of_places


def arange(ranges: ValueRanges, node: Node) -> Range | None:
    """Computes the range of an ``arange`` whose ends are known."""
    bounds = [value for value in node.args if isinstance(value, int)]
    if len(bounds) != len(node.args) or not bounds:
        return None
    start, end, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    values = range(start, end, step)
    return (min(values[0], values[-1]), max(values[0], values[-1])) if values else (0, 0)


def clamped(ranges: ValueRanges, node: Node) -> Range | None:
    """Computes the range of a clamp with one bound or both; any of its operands may be unknown."""
    arguments, unknown = arguments_of(node), (-math.inf, math.inf)
    least, most = ranges.of(arguments["self"]) or unknown
    if arguments.get("min") is not None:
        low = ranges.of(arguments["min"]) or unknown
        least, most = max(least, low[0]), max(most, low[1])
    # In torch, the upper bound wins where the bounds cross.
    if arguments.get("max") is not None:
        high = ranges.of(arguments["max"]) or unknown
        least, most = min(least, high[0]), min(most, high[1])
    return (int(least), int(most)) if math.isfinite(least) and math.isfinite(most) else None


def remainder(ranges: ValueRanges, node: Node) -> Range | None:
    """Computes the range of a remainder with the sign of its divisor; known for positive divisors only."""
    divisor = ranges.of(node.args[1])
    return (0, divisor[1] - 1) if divisor is not None and divisor[0] > 0 else None


def quotient(ranges: ValueRanges, node: Node) -> Range | None:
    """Computes the range of a division that rounds down or towards 0; known for positive divisors only."""
    x, divisor = ranges.of(node.args[0]), ranges.of(node.args[1])
    if x is None or divisor is None or divisor[0] <= 0:
        return None
    return min(x[0], 0), max(x[1], 0)
