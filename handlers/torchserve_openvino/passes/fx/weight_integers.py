"""Computes in torch what only rearranges the bits of integer weights: 4-bit weights are packed two to a byte.

OpenVINO has neither these operators nor torch's arithmetic in 8 bits. Their results depend on weights only, so they
are constants: as 8-bit integers wherever these suffice, of which `passes/ov/low_bits.py` makes 4-bit ones.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from torchserve_openvino.errors import TorchServeOpenVINOError
from torchserve_openvino.ops.names import op_name, tensors_of, value_of
from torchserve_openvino.passes.pass_context import PassContext

# Keys in the ``meta`` of a node: it depends on weights only and is an integer; and why OpenVINO can't compute it.
CLOSED, REFUSED = "openvino_closed_integer", "openvino_closed_reason"
_CAST, _SUBTRACT = torch.ops.aten._to_copy.default, torch.ops.aten.sub.Tensor
_WIDE = (torch.int16, torch.int32, torch.int64)
# A narrower type saves nothing for less.
_LEAST = 1024


class UnfoldedError(TorchServeOpenVINOError, RuntimeError):
    """Weights that were to be constants are not.

    Attributes:
        op: The operator that needs them.
    """

    def __init__(self, op: str, reason: str) -> None:
        self.op = op
        super().__init__(reason)


def mark_closed(graph: Graph, context: PassContext) -> None:
    """Marks the integers that are computed from weights alone.

    Args:
        graph: A lowered graph.
        context: Has the positions of the placeholders that are weights.
    """
    places = graph.find_nodes(op="placeholder")
    closed = {places[position] for position in context.static} | set(graph.find_nodes(op="get_attr"))
    for node in graph.nodes:
        if _is_pure(node) and node.all_input_nodes and all(source in closed for source in node.all_input_nodes):
            closed.add(node)
            if _is_integer(node) and not any(user.op == "output" for user in node.users):
                node.meta[CLOSED] = True


def _is_pure(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.is_mutable:
        return False
    value = value_of(node)
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def _is_integer(node: Node) -> bool:
    return all(t.dtype in (*_WIDE, torch.uint8, torch.int8) for t in tensors_of(value_of(node)))


def fold_closed(graph: Graph, context: PassContext) -> None:
    """Replaces such integers with constants.

    Args:
        graph: A part of a graph that `mark_closed` looked at; changed in place.
        context: Has the weights by position; gets the tensors of new ``get_attr`` nodes.

    Raises:
        UnfoldedError: An operator that OpenVINO can't compute does not depend on constants only.
    """
    if not any(CLOSED in node.meta for node in graph.nodes):
        return
    root = context.tensors
    known: dict[Node, torch.Tensor] = {node: root[str(node.target)] for node in graph.find_nodes(op="get_attr")}
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        if position in context.constants:
            known[node] = context.constants[position].detach()
    weights = set(known)
    with torch.no_grad():
        for node in graph.nodes:
            # What another part computes is a placeholder here, with the same meta.
            computed = node.op == "call_function" and CLOSED in node.meta
            if computed and all(source in known for source in node.all_input_nodes):
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)
    constants: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node in known and node not in weights:
            for user in [user for user in node.users if user not in known and user.op != "output"]:
                _replace(user, node, known, constants, root)
    for node in reversed(list(graph.nodes)):
        if node in known and node not in weights and not node.users:
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "call_function" and REFUSED in node.meta:
            raise UnfoldedError(op_name(node.target), node.meta[REFUSED])


def _replace(
    user: Node, node: Node, known: Mapping[Node, torch.Tensor], constants: dict[Node, Node], root: dict[str, Any]
) -> None:
    """Lets a node take a constant instead of what was computed."""
    operands = node.args[:2]
    difference = node.target is _SUBTRACT and not node.kwargs and len(operands) == 2
    casts = user.target is _CAST and user.kwargs == {"dtype": torch.float32} and value_of(node).dtype in _WIDE
    if difference and casts and all(isinstance(operand, Node) and _narrow(known[operand]) for operand in operands):
        # Exact in float32, too, and then the minuend keeps its few bits.
        with node.graph.inserting_before(user):
            floats = [_cast(_constant(operand, known, constants, root), torch.float32) for operand in operands]  # type: ignore[arg-type]
            new = node.graph.call_function(_SUBTRACT, tuple(floats))
        new.meta = dict(user.meta)
        user.replace_all_uses_with(new)
        node.graph.erase_node(user)
        return
    user.replace_input_with(node, _constant(node, known, constants, root))


def _constant(
    node: Node, known: Mapping[Node, torch.Tensor], constants: dict[Node, Node], root: dict[str, Any]
) -> Node:
    """Returns a node with the value of another: a constant in 8 bits if these suffice, and a cast to its type."""
    if node.op in {"placeholder", "get_attr"}:
        return node
    if node not in constants:
        value = known[node]
        name, narrow = f"integers_of_{node.name}", _narrow(value) if value.numel() >= _LEAST else None
        root[name] = value.to(narrow).contiguous() if narrow is not None else value.contiguous()
        with node.graph.inserting_before(node):
            constant = node.graph.get_attr(name)
            constant.meta = {"val": value_of(node).to(narrow) if narrow is not None else value_of(node)}
            constants[node] = constant if narrow is None else _cast(constant, value.dtype)
    return constants[node]


def _narrow(value: torch.Tensor) -> torch.dtype | None:
    """Returns the type of 8 bits that holds all values; None if there is none, or no need of one."""
    if not value.numel() or value.dtype not in (*_WIDE, torch.uint8, torch.int8):
        return None
    least, most = (int(bound) for bound in torch.aminmax(value.to(torch.int64)))
    if least >= 0 and most <= 255:
        return torch.uint8
    return torch.int8 if least >= -128 and most <= 127 else None


def _cast(node: Node, dtype: torch.dtype) -> Node:
    value = value_of(node)
    if value.dtype is dtype:
        return node
    cast = node.graph.call_function(_CAST, (node,), {"dtype": dtype})
    cast.meta = {"val": value.to(dtype)}
    return cast
