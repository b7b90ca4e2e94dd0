"""Bounds of integer inputs that are used as indices into a tensor.

PyTorch raises for an index out of range; OpenVINO's Gather returns zeros, and counts a negative index from the end. An
input that reaches an indexing operator unchanged therefore gets bounds, which each call checks; an index that is
computed inside the graph is checked there (`checks.py`).
"""

import operator

import torch
from torch.fx import Graph, Node

from torchserve_openvino.config.op_names import packet_name
from torchserve_openvino.ops.names import op_name, tensors_of, value_of
from torchserve_openvino.ops.rule_registry import Movement, rule_of
from torchserve_openvino.passes.pass_context import Bounds

# The largest 32-bit integer: the end is not known in advance, and OpenVINO itself raises beyond it.
_ANY = 2**31 - 1
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def index_bounds(graph: Graph) -> dict[str, Bounds]:
    """Returns the smallest and largest allowed value of each placeholder that is an index, by its name."""
    by_name = {}
    for node in graph.find_nodes(op="placeholder"):
        if any(tensor.dtype in _INTEGERS for tensor in tensors_of(value_of(node))):
            bounds = [bound for user, source in _reached(node) for bound in _bounds(user, source)]
            if bounds:
                first, last = (
                    next((e for e in ends if e is not None), None)
                    for ends in zip(*(b[3:] for b in bounds), strict=True)
                )
                low, high = max(bound.low for bound in bounds), min(bound.high for bound in bounds)
                by_name[node.name] = Bounds(low, high, first=first, last=last)
    return by_name


def _reached(start: Node) -> list[tuple[Node, Node]]:
    """Returns the users of a value, also through nodes that only pass it on, as (user, node that it takes it from)."""
    users: list[tuple[Node, Node]] = []
    seen, waiting = {start}, [start]
    while waiting:
        source = waiting.pop()
        for user in source.users:
            users.append((user, source))
            if user.op == "call_function" and user not in seen and _hands_on(user):
                seen.add(user)
                waiting.append(user)
    return users


def _hands_on(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    integer = all(tensor.dtype in _INTEGERS for tensor in tensors_of(value_of(node)))
    return integer and rule_of(op_name(node.target)).movement is Movement.REARRANGES


def selections(node: Node) -> list[tuple[Node, int, Node, bool]]:
    """Returns a node's selections: tensor, dimension, index, and whether an index below 0 counts from the end.

    Leaves out masks, and indices that torch itself does not check (`aten._unsafe_index`).
    """
    if node.op != "call_function" or node.target is operator.getitem:
        return []
    name = op_name(node.target)
    if packet_name(name) in {"aten.index", "aten.index_put"}:
        source, indices = node.args[:2]
        assert isinstance(source, Node) and isinstance(indices, (list, tuple))
        whole = [(dim, index) for dim, index in enumerate(indices) if isinstance(index, Node)]
        # A mask of several dimensions shifts the dimensions of the indices after it.
        if any(value_of(index).dtype not in _INTEGERS for _, index in whole):
            return []
        return [(source, dim, index, True) for dim, index in whole]
    where = rule_of(name).index
    if where is None or len(node.args) <= where.index:
        return []
    source, index = node.args[where.source], node.args[where.index]
    along = node.args[where.dim] if where.dim is not None else 0
    if not (isinstance(source, Node) and isinstance(index, Node) and isinstance(along, int)):
        return []
    return [(source, along, index, False)] if value_of(source).dim() else []


def _bounds(node: Node, index: Node) -> list[Bounds]:
    bounds = []
    for source, dim, selection, negative in selections(node):
        size = value_of(source).shape[dim]
        if selection is index and isinstance(size, int):
            bounds.append(Bounds(-size if negative else 0, size - 1))
    return bounds + _of_bags(node, index)


def _of_bags(node: Node, index: Node) -> list[Bounds]:
    """Returns the bounds of bag offsets: the first bag starts at element 0, none after the last element."""
    bags = rule_of(op_name(node.target)).bags if node.op == "call_function" else None
    if bags is None or node.args[bags.offsets] is not index:
        return []
    length = value_of(node.args[bags.rows]).shape[0]  # type: ignore[arg-type]
    known = isinstance(length, int)
    last = length if known and bags.includes_last(node) else None
    return [Bounds(0, length if known else _ANY, first=0, last=last)]
