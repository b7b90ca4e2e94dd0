"""Removes tensors without elements, which OpenVINO rejects, where they contribute nothing to a result.

transformers' cache joins its first keys to an empty tensor, rotary embeddings the part of a head that they do not
rotate, which may be empty. Each such operator would cut the graph, although its result is that of its other operands.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from torchserve_openvino.ops.memory_order import layout_of
from torchserve_openvino.ops.names import arguments_of, is_empty, tensors_of, value_of
from torchserve_openvino.passes.pass_context import PassContext

aten = torch.ops.aten
# The arguments that determine which elements an operator overwrites: without any, its result is its first argument.
_WRITES = {
    aten.slice_scatter.default: "src",
    aten.scatter.src: "index",
    aten.scatter.value: "index",
    aten.scatter_add.default: "index",
    aten.scatter_reduce.two: "index",
    aten.index_add.default: "index",
    aten.index_copy.default: "index",
    aten.index_fill.int_Scalar: "index",
    aten.index_put.default: "indices",
}


def remove_empty_operands(graph: Graph, _: PassContext) -> None:
    """Removes empty operands of `cat`, and writes to no element.

    Args:
        graph: A lowered graph; changed in place.
        _: Not needed.
    """
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        value, sources = value_of(node), [value_of(source) for source in node.all_input_nodes]
        if not isinstance(value, Tensor) or is_empty(value) or not any(map(is_empty, tensors_of(sources))):
            continue
        if node.target is aten.cat.default:
            changed |= _join_others(node)
        elif node.target in _WRITES:
            changed |= _keep_target(node)
    if changed:
        _drop_unused(graph)


def _join_others(node: Node) -> bool:
    """Leaves the operands of a `cat` that have elements; returns True if the memory order of its result stays."""
    value, args = value_of(node), node.args
    operands: Any = args[0]
    rest = args[1:]
    others = [operand for operand in operands if not is_empty(value_of(operand))]
    # An empty operand counts in the type of the result.
    cast = [operand for operand in others if value_of(operand).dtype is not value.dtype]
    joined = aten.cat.default([value_of(operand) for operand in others], *rest, **node.kwargs)
    if len(others) == 1 and layout_of(value) is None:
        options: dict[str, Any] = {"dtype": value.dtype} if cast else {"memory_format": torch.contiguous_format}
        node.target, node.args, node.kwargs = (aten._to_copy if cast else aten.clone).default, (others[0],), options
        return True
    if layout_of(joined) != layout_of(value) or cast:
        return False
    node.args = (others, *rest)
    return True


def _keep_target(node: Node) -> bool:
    """Replaces a write to no element with a copy of the tensor that it would change."""
    name: Any = node.target
    written = arguments_of(node)[_WRITES[name]]
    target = node.args[0]
    # Indices are None where a dimension is taken whole.
    results = [r for r in (written if isinstance(written, (list, tuple)) else [written]) if isinstance(r, Node)]
    if not any(is_empty(value_of(result)) for result in results):
        return False
    if not isinstance(target, Node) or layout_of(value_of(target)) != layout_of(value_of(node)):
        return False
    node.target, node.args, node.kwargs = aten.clone.default, (target,), {}
    return True


def _drop_unused(graph: Graph) -> None:
    """Erases what computed the removed operands: empty tensors, and the views and copies of constants before them."""
    for node in reversed(list(graph.nodes)):
        target = node.target
        if node.users or node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        if is_empty(value_of(node)) and not target._schema.is_mutable:
            graph.erase_node(node)
