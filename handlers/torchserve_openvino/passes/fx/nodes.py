"""Nodes that passes add to a graph, or replace."""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from torchserve_openvino.ops.names import value_of

aten = torch.ops.aten


def add_call(graph: Graph, op: Any, *args: Any, **kwargs: Any) -> Node:
    """Adds a node with its fake value at the graph's current insertion point."""
    node = graph.call_function(op, args, kwargs)
    node.meta["val"] = op(*torch.fx.node.map_arg(args, value_of), **kwargs)
    return node


def replace(node: Node, new: Node) -> None:
    """Puts a node in the place of another, whose fake value it has."""
    new.meta = {**node.meta, "val": value_of(node)}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def size_of(graph: Graph, source: Node, dim: int) -> Any:
    """Returns the size of a dimension: a number, or a node if it is symbolic."""
    size = value_of(source).shape[dim]
    return size if isinstance(size, int) else add_call(graph, aten.sym_size.int, source, dim)


def is_returned(node: Node) -> bool:
    """Returns True if the graph returns a value, or what may be a view of it."""
    return any(user.op == "output" or (may_be_view(user) and is_returned(user)) for user in node.users)


def may_be_view(node: Node) -> bool:
    """Returns True if a node's result may have the memory of its input."""
    op = node.target
    # The parts of what splits a tensor.
    if op in {aten.reshape.default, operator.getitem}:
        return True
    return isinstance(op, torch._ops.OpOverload) and op.is_view
