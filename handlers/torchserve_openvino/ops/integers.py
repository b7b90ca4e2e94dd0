"""Bounds on the integers that operators return, from bounds on their inputs: steps of interval arithmetic."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torchserve_openvino.ops.names import arguments_of, tensors_of, value_of


@dataclass(frozen=True)
class Operands:
    """The operands of an operator.

    Attributes:
        node: The operator's node.
        nodes: Largest absolute value of each input node.
        size: Upper bound of symbolic sizes.
    """

    node: Node
    nodes: Mapping[Node, int]
    size: int

    def value(self, argument: int) -> int:
        """Returns the largest absolute value of an argument; 0 if it is not a number."""
        return self.of(self.node.args[argument]) if self.node.args else 0

    def values(self) -> list[int]:
        """Returns the same for all positional arguments."""
        return [self.of(argument) for argument in self.node.args]

    def of(self, argument: Any) -> int:
        """Returns the largest absolute value of a node or a number; 0 for anything else."""
        return self.nodes[argument] if isinstance(argument, Node) else magnitude(argument)

    def elements(self, source: Any, dims: Any = None) -> int:
        """Returns how many elements a node's tensor has at most, over all or some of its dimensions."""
        shape = next((tensor.shape for tensor in tensors_of(value_of(source))), torch.Size())
        chosen = [dims] if isinstance(dims, int) else dims
        some = isinstance(chosen, (list, tuple)) and chosen and shape
        over: Sequence[Any] = [shape[dim] for dim in chosen] if some else shape
        return math.prod(most(size, self.size) for size in over)


IntegerBound = Callable[[Operands], int]


def most(value: int | torch.SymInt, size: int, *, divides: bool = False) -> int:
    """Returns the largest absolute value of a size, or of what Python computes from sizes.

    Args:
        value: A number, or an expression of symbols.
        size: Upper bound of the symbols' absolute values.
        divides: Whether the bound of a quotient is divided, too: closer, where few sizes are tried (`int_range`).
    """
    return abs(value) if isinstance(value, int) else _most(value.node.expr, size, divides)


def _most(expression: Any, size: int, divides: bool) -> int:
    if not expression.args:
        return size if expression.is_Symbol else math.ceil(abs(expression))
    parts = [_most(arg, size, divides) for arg in expression.args]
    kind = type(expression).__name__
    if kind == "Add":
        return sum(parts)
    if kind == "Pow":
        return int(parts[0] ** parts[1])
    if kind in {"Max", "Min"}:
        return max(parts)
    if kind in {"FloorDiv", "CleanDiv"}:
        return parts[0] // max(parts[1], 1) + 1 if divides and expression.args[1].is_Integer else parts[0]
    # A product; more than enough for a remainder and the like.
    return parts[0] * math.prod(max(part, 1) for part in parts[1:])


def magnitude(value: object) -> int:
    """Returns the absolute value of a number, rounded towards 0, or one more; 0 for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        # Of +-2^31, only the negative one has 32 bits.
        return abs(int(value)) + (value > 2**31 - 1)
    return 0


def largest(operands: Operands) -> int:
    """Bounds an operator that selects, moves or shrinks: no value exceeds those of its inputs and a fill value."""
    node = operands.node
    plain = [value for value in (*node.args, *node.kwargs.values()) if not isinstance(value, Node)]
    return max([*operands.nodes.values(), *map(magnitude, plain)], default=0)


def largest_tensor(operands: Operands) -> int:
    """Like `largest`, where other arguments are sizes or positions: the end of a slice may be any number."""
    return max((value for node, value in operands.nodes.items() if tensors_of(value_of(node))), default=0)


def of_argument(argument: int) -> IntegerBound:
    """Bounds an operator that returns values of one argument only; the others are sizes or positions."""
    return lambda operands: operands.value(argument)


first = of_argument(0)


def at_most(value: int) -> IntegerBound:
    """Bounds an operator that fills with a known number."""
    return lambda operands: value


def sum_of_two(operands: Operands) -> int:
    """Bounds a sum or difference in which ``alpha`` scales one of the operands."""
    alpha = operands.of(arguments_of(operands.node).get("alpha", 1))
    return (operands.value(0) + operands.value(1)) * max(1, alpha)


def product_of_two(operands: Operands) -> int:
    """Bounds a product."""
    return operands.value(0) * operands.value(1)


def quotient(operands: Operands) -> int:
    """Bounds a division by a number; any other divisor may be 1."""
    divisor = operands.node.args[1]
    return operands.value(0) // divisor + 1 if isinstance(divisor, int) and divisor > 1 else largest(operands)


def below_second(operands: Operands) -> int:
    """Bounds a remainder, which is smaller than the divisor."""
    return max(operands.value(1) - 1, 0)


def sum_of_bits(operands: Operands) -> int:
    """Bounds a bitwise operator: it sets no bit above the highest one of its arguments."""
    return sum(operands.values() or [0]) + 1


def total(operands: Operands) -> int:
    """Bounds a sum, or a running sum, along the dimensions that the second argument names."""
    args = operands.node.args
    return operands.value(0) * max(1, operands.elements(args[0], args[1] if len(args) > 1 else None))


def plus_all_of(argument: int) -> IntegerBound:
    """Bounds an operator that may add all values of an argument to a single one of the first argument."""

    def bound(operands: Operands) -> int:
        added = operands.node.args[argument]
        more = operands.value(argument) * operands.elements(added) if isinstance(added, Node) else 0
        return operands.value(0) + more

    return bound


def put(operands: Operands) -> int:
    """Bounds an operator that replaces values by those of the third argument, or adds these to one of them.

    One value may be added as often as there are indices.
    """
    arguments = arguments_of(operands.node)
    if not arguments.get("accumulate"):
        return max(operands.value(0), operands.value(2))
    times = math.prod(operands.elements(index) for index in arguments["indices"] if index is not None)
    return plus_all_of(2)(operands) + operands.value(2) * times


def place(operands: Operands) -> int:
    """Bounds an operator that returns positions: along ``dim``, or in the whole tensor."""
    return _places(operands, None)


def value_or_place(operands: Operands) -> int:
    """Bounds an operator that returns values and their positions along ``dim``, by default the last."""
    source = operands.node.all_input_nodes[0]
    places = _places(operands, -1)
    if any(tensor.is_floating_point() for tensor in tensors_of(value_of(source))):
        return places
    return max(largest(operands), places)


def _places(operands: Operands, default: int | None) -> int:
    dim = arguments_of(operands.node).get("dim", default)
    return operands.elements(operands.node.all_input_nodes[0], dim)
