"""Takes the real or imaginary part of complex numbers from where the pair was made of both.

Complex numbers are pairs with a last dimension of 2 (`ops.rules.complex_numbers`). Most operators compute both parts
apart and join them, and the next one takes them apart again: two strided copies, also of a part that nobody needs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from torchserve_openvino.ops.names import value_of
from torchserve_openvino.passes.context import PassContext
from torchserve_openvino.passes.fx.nodes import add_call

aten = torch.ops.aten
# Returns the arguments that do to a part what those of a node do to pairs; None if the parts do not stay apart.
_Arguments = Callable[[Node, int], "tuple[Any, ...] | None"]


def take_parts(graph: Graph, _: PassContext) -> None:
    """Replaces each selection of a part by that part, in place, where the graph has it.

    Args:
        graph: A lowered graph. A part that it returns stays a selection, with its strides.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.select.int or not _is_last(node, node.args[1]):
            continue
        if any(user.op == "output" for user in node.users):
            continue
        with graph.inserting_before(node):
            part = _part(graph, node.args[0], node.args[2] % 2)
        if part is not None:
            node.replace_all_uses_with(part)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        is_idle = node.op == "call_function" and not node.users
        if is_idle and node.target in {*_MOVES, aten.cat.default, aten.clone.default}:
            graph.erase_node(node)


def _is_last(node: Node, dim: Any) -> bool:
    """Returns True if a dimension is the last one of what a node takes, and has two elements."""
    value = value_of(node.args[0])
    return isinstance(value, Tensor) and dim % value.dim() == value.dim() - 1 and value.shape[-1] == 2


def _part(graph: Graph, node: Any, which: int) -> Node | None:
    """Returns a node with a part of pairs: one that they were joined of, moved as they were."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target is aten.cat.default:
        return _joined(node, which)
    if node.target is aten.clone.default:
        return _part(graph, node.args[0], which)
    arguments = _MOVES[node.target](node, value_of(node).dim()) if node.target in _MOVES else None
    if arguments is None or (source := _part(graph, node.args[0], which)) is None:
        return None
    return add_call(graph, node.target, source, *arguments)


def _joined(node: Node, which: int) -> Node | None:
    """Returns one of the two tensors that a node stacks along a new last dimension."""
    columns, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    last = value_of(node).dim() - 1
    if dim not in (-1, last) or len(columns) != 2:  # type: ignore[arg-type]
        return None
    column = columns[which]  # type: ignore[index]
    if column.op != "call_function" or column.target is not aten.unsqueeze.default or column.args[1] not in (-1, last):
        return None
    part = column.args[0]
    return part if isinstance(part, Node) else None


def _permuted(node: Node, rank: int) -> tuple[Any, ...] | None:
    dims = [dim % rank for dim in node.args[1]]  # type: ignore[union-attr]
    return (dims[:-1],) if dims[-1] == rank - 1 else None


def _along(node: Node, rank: int) -> tuple[Any, ...] | None:
    dim = node.args[1] if len(node.args) > 1 else 0
    rank = value_of(node.args[0]).dim()
    return (dim % rank, *node.args[2:]) if dim % rank != rank - 1 else None  # type: ignore[operator]


def _unsqueezed(node: Node, rank: int) -> tuple[Any, ...] | None:
    dim = node.args[1] % rank  # type: ignore[operator]
    return (dim,) if dim != rank - 1 else None


def _reshaped(node: Node, rank: int) -> tuple[Any, ...] | None:
    source = value_of(node.args[0])
    return (node.args[1][:-1],) if source.shape[-1] == 2 == value_of(node).shape[-1] else None  # type: ignore[index]


_MOVES: dict[Any, _Arguments] = {
    aten.permute.default: _permuted, aten.slice.Tensor: _along, aten.select.int: _along,
    aten.unsqueeze.default: _unsqueezed, aten.reshape.default: _reshaped, aten.neg.default: lambda *_: (),
}  # fmt: skip
