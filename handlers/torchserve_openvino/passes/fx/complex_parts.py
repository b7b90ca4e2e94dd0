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
from torchserve_openvino.passes.fx.nodes import add_call, is_returned, may_be_view
from torchserve_openvino.passes.pass_context import PassContext

aten = torch.ops.aten
# Returns the arguments that do to a part what those of a node do to pairs; None if the parts do not stay apart.
_PartArguments = Callable[[Node, int], "tuple[Any, ...] | None"]


def take_parts(graph: Graph, _: PassContext) -> None:
    """Replaces each selection of a part by that part, in place, where the graph has it.

    Args:
        graph: A lowered graph. A part that it returns, or a view of one, stays a selection: it must have the strides
            of one, and not be the memory of an input.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.select.int or not _is_last(node):
            continue
        which = _arguments(node)[2]
        if not isinstance(which, int):
            # The caller's number.
            continue
        if is_returned(node):
            continue
        with graph.inserting_before(node):
            part = _part(graph, _arguments(node)[0], which % 2)
        if part is not None and any(map(may_be_view, node.users)) and not value_of(part).is_contiguous():
            # Views of the selection need not be possible of the part.
            part = None
        if part is not None:
            node.replace_all_uses_with(part)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        is_idle = node.op == "call_function" and not node.users
        if is_idle and node.target in {*_MOVES, aten.cat.default, aten.clone.default}:
            graph.erase_node(node)


def _arguments(node: Node) -> tuple[Any, ...]:
    return node.args


def _is_last(node: Node) -> bool:
    """Returns True if a node selects along the last dimension of what it takes, and that one has two elements."""
    source, dim, *_ = _arguments(node)
    value = value_of(source)
    if not isinstance(value, Tensor) or dim % value.dim() != value.dim() - 1:
        return False
    size = value.shape[-1]
    # A symbol would get a guard.
    return isinstance(size, int) and size == 2


def _part(graph: Graph, node: Any, which: int) -> Node | None:
    """Returns a node with a part of pairs: one that they were joined of, moved as they were."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target is aten.cat.default:
        return _joined(node, which)
    if node.target is aten.clone.default:
        return _part(graph, _arguments(node)[0], which)
    moves = node.target in _MOVES and not node.kwargs
    arguments = _MOVES[node.target](node, value_of(node).dim()) if moves else None
    if arguments is None or (source := _part(graph, _arguments(node)[0], which)) is None:
        return None
    if node.target not in _VIEWS:
        return add_call(graph, node.target, source, *arguments)
    # A part need not have the memory order that a view of the pairs relied on.
    is_possible = value_of(source).is_contiguous()
    return add_call(graph, aten.view.default, source, *arguments) if is_possible else None


def _joined(node: Node, which: int) -> Node | None:
    """Returns one of the two tensors that a node stacks along a new last dimension."""
    columns, *dims = _arguments(node)
    last = value_of(node).dim() - 1
    if dims not in ([-1], [last]) or len(columns) != 2:
        return None
    column = columns[which]
    if column.op != "call_function" or column.target is not aten.unsqueeze.default:
        return None
    part, dim = _arguments(column)
    # A concatenation converts its parts to one type.
    is_same = dim in (-1, last) and value_of(part).dtype == value_of(node).dtype
    return part if is_same else None


def _permuted(node: Node, rank: int) -> tuple[Any, ...] | None:
    dims = [dim % rank for dim in _arguments(node)[1]]
    return (dims[:-1],) if dims[-1] == rank - 1 else None


def _along(node: Node, rank: int) -> tuple[Any, ...] | None:
    dim = _arguments(node)[1] if len(_arguments(node)) > 1 else 0
    rank = value_of(_arguments(node)[0]).dim()
    return (dim % rank, *_arguments(node)[2:]) if dim % rank != rank - 1 else None


def _unsqueezed(node: Node, rank: int) -> tuple[Any, ...] | None:
    dim = _arguments(node)[1] % rank
    return (dim,) if dim != rank - 1 else None


def _reshaped(node: Node, rank: int) -> tuple[Any, ...] | None:
    source = value_of(_arguments(node)[0])
    return (_arguments(node)[1][:-1],) if source.shape[-1] == 2 == value_of(node).shape[-1] else None


def _squeezed(node: Node, rank: int) -> tuple[Any, ...] | None:
    source, dims = _arguments(node)
    last = value_of(source).dim() - 1
    dims = [dim % (last + 1) for dim in dims]
    return None if last in dims else (dims,)


_VIEWS = (aten.view.default, aten._unsafe_view.default)
_MOVES: dict[Any, _PartArguments] = {
    aten.permute.default: _permuted, aten.slice.Tensor: _along, aten.select.int: _along,
    aten.unsqueeze.default: _unsqueezed, aten.squeeze.dims: _squeezed, aten.neg.default: lambda *_: (),
    **dict.fromkeys(_VIEWS, _reshaped),
}  # fmt: skip
