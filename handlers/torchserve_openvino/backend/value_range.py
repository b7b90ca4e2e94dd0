"""Which values the integers of a graph may have: interval arithmetic over its nodes.

Only what follows from the graph alone counts, from its constants, and from what each call checks of its inputs. None
stands for "not known", which costs a check at run time and never an answer.
"""

import operator
from collections.abc import Callable, Mapping

import torch
from torch.fx import Graph, Node

from torchserve_openvino.ops.movement import COMPARES, HANDS_ON, LOOKS_UP
from torchserve_openvino.ops.names import arguments_of, op_name, packet_name, packets, tensors_of, value_of

Range = tuple[int, int]

_TRUTH = COMPARES | packets("logical_and logical_or logical_not logical_xor any all isnan isinf isfinite")
_POSITIONS = packets("argmax argmin argsort")
_VALUES_AND_POSITIONS = packets("sort topk max min")


class ValueRanges:
    """Answers for the nodes of one graph.

    Args:
        graph: A partition's graph.
        inputs: What each call checks of a placeholder, or of an integer that a float becomes, by the node's name.
        constants: Real tensors behind placeholders and ``get_attr`` nodes, by the node's name.
    """

    def __init__(self, graph: Graph, inputs: Mapping[str, Range], constants: Mapping[str, torch.Tensor]) -> None:
        self._found: dict[Node, Range | None] = {}
        self._inputs = inputs
        self._constants = constants
        # In order, so that no look-up goes deep.
        for node in graph.nodes:
            self._found[node] = self._of(node)

    def of(self, value: object) -> Range | None:
        """Least and largest value of a node or a Python number; None where nothing is known."""
        if isinstance(value, Node):
            if value not in self._found:
                # Added to the graph since.
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
            return (0, 255) if dtype is torch.uint8 else None
        if node.target is operator.getitem:
            return self._of_item(node)
        name = packet_name(op_name(node.target))
        if name in _TRUTH:
            return 0, 1
        if name in HANDS_ON or name in LOOKS_UP:
            return self._of_moved(node, dtype)
        rule = _RULES.get(name)
        return rule(self, node) if rule is not None else None

    def _of_item(self, node: Node) -> Range | None:
        source, place = node.args[0], node.args[1]
        if not isinstance(source, Node):
            return None
        name = packet_name(op_name(source.target))
        if name in _VALUES_AND_POSITIONS:
            return _positions(source) if place == 1 else self.of(source.args[0])
        return self._found.get(source) if name in HANDS_ON else None

    def _of_moved(self, node: Node, dtype: torch.dtype | None) -> Range | None:
        if dtype is None and not isinstance(value_of(node), (list, tuple)):
            return None
        first = node.args[0]
        sources = list(first) if isinstance(first, (list, tuple)) else [first]
        found = _union([self.of(source) for source in sources])
        if packet_name(op_name(node.target)) != "aten._to_copy" or found is None:
            return found
        # A narrower type would wrap around.
        limits = torch.iinfo(dtype) if dtype is not None and not dtype.is_floating_point else None
        return found if limits is not None and limits.min <= found[0] and found[1] <= limits.max else None

    # --- operators that compute -------------------------------------------------------------------------------

    def _both(self, node: Node, combine: Callable[[Range, Range], Range]) -> Range | None:
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) < 2:
            return None
        x, y = self.of(node.args[0]), self.of(node.args[1])
        return None if x is None or y is None else combine(x, y)


def _of_tensor(tensor: torch.Tensor) -> Range | None:
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        return None
    low, high = torch.aminmax(tensor.to(torch.int64))
    return int(low), int(high)


def _union(ranges: list[Range | None]) -> Range | None:
    known = [found for found in ranges if found is not None]
    return (min(r[0] for r in known), max(r[1] for r in known)) if len(known) == len(ranges) and known else None


def _positions(node: Node) -> Range | None:
    """What an operator answers that names positions along a dimension, or in the whole tensor."""
    source = node.args[0]
    shape = next((t.shape for t in tensors_of(value_of(source))), None) if isinstance(source, Node) else None
    dim = arguments_of(node).get("dim", None if packet_name(op_name(node.target)) in _POSITIONS else -1)
    if not shape:
        return 0, 0
    size = shape.numel() if dim is None else shape[dim] if isinstance(dim, int) else None
    return (0, size - 1) if isinstance(size, int) else None


def _product(x: Range, y: Range) -> Range:
    ends = [a * b for a in x for b in y]
    return min(ends), max(ends)


def _arange(ranges: ValueRanges, node: Node) -> Range | None:
    bounds = [value for value in node.args if isinstance(value, int)]
    if len(bounds) != len(node.args) or not bounds:
        return None
    start, end, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    values = range(start, end, step)
    return (min(values), max(values)) if values else (0, 0)


def _clamp(ranges: ValueRanges, node: Node) -> Range | None:
    given = arguments_of(node)
    low, high = ranges.of(given.get("min")), ranges.of(given.get("max"))
    found = ranges.of(given["self"])
    if found is None and (low is None or high is None):
        return None
    least = max([r[0] for r in (found, low) if r is not None])
    most = min([r[1] for r in (found, high) if r is not None])
    # torch: where the bounds cross, the upper one wins.
    return min(least, most), max(least, most)


def _remainder(ranges: ValueRanges, node: Node) -> Range | None:
    divisor = ranges.of(node.args[1])
    return (0, divisor[1] - 1) if divisor is not None and divisor[0] > 0 else None


def _quotient(ranges: ValueRanges, node: Node) -> Range | None:
    x, divisor = ranges.of(node.args[0]), ranges.of(node.args[1])
    if x is None or divisor is None or divisor[0] <= 0:
        return None
    # Rounded down or towards 0: within the dividend and one step below.
    return min(x[0], 0) if x[0] < 0 else 0, max(x[1], 0)


def _masked(ranges: ValueRanges, node: Node) -> Range | None:
    return _union([ranges.of(node.args[0]), ranges.of(node.args[2])])


_RULES: dict[str, Callable[[ValueRanges, Node], Range | None]] = {
    "aten.arange": _arange,
    "aten.clamp": _clamp,
    "aten.clamp_min": _clamp,
    "aten.clamp_max": lambda r, n: (
        (found[0], min(found[1], most[1]))
        if (found := r.of(n.args[0])) is not None and (most := r.of(n.args[1])) is not None and found[0] <= most[1]
        else None
    ),
    "aten.remainder": _remainder,
    "aten.div": _quotient,
    "aten.where": lambda r, n: _union([r.of(arg) for arg in n.args[1:3]]) if len(n.args) > 2 else None,
    "aten.masked_fill": _masked,
    "aten.full": lambda r, n: r.of(n.args[1]),
    "aten.full_like": lambda r, n: r.of(n.args[1]),
    "aten.scalar_tensor": lambda r, n: r.of(n.args[0]),
    "aten.zeros": lambda r, n: (0, 0),
    "aten.zeros_like": lambda r, n: (0, 0),
    "aten.ones": lambda r, n: (1, 1),
    "aten.ones_like": lambda r, n: (1, 1),
    "aten.add": lambda r, n: r._both(n, lambda x, y: (x[0] + y[0], x[1] + y[1])),
    "aten.sub": lambda r, n: r._both(n, lambda x, y: (x[0] - y[1], x[1] - y[0])),
    "aten.rsub": lambda r, n: r._both(n, lambda x, y: (y[0] - x[1], y[1] - x[0])),
    "aten.mul": lambda r, n: r._both(n, _product),
    "aten.minimum": lambda r, n: r._both(n, lambda x, y: (min(x[0], y[0]), min(x[1], y[1]))),
    "aten.maximum": lambda r, n: r._both(n, lambda x, y: (max(x[0], y[0]), max(x[1], y[1]))),
    **{name: lambda r, n: _positions(n) for name in _POSITIONS},
}
