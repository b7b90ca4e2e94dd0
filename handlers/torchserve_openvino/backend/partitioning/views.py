"""Lets torch make the views that leave the graph, because OpenVINO would return copies.

AOTAutograd rebuilds an output that shares memory with an input (or with another output) from the strides and the offset
of what the graph returns, so a contiguous copy in its place gives wrong values. A view that is returned, or that an
operator in eager PyTorch takes (it may return another view of it, or adopt its layout), is therefore made in the outer
graph, where it costs nothing: views of inputs and weights always; views of computed values if another output shares
their memory, or if OpenVINO can't lay them out in memory as torch does. Such a view computes nothing, and does not
count as an operator.
"""

import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from torchserve_openvino.ops.memory_order import example_of, example_strides
from torchserve_openvino.ops.names import HANDED_OUT, is_symbolic_scalar, op_name, value_of

aten = torch.ops.aten


def hand_out_views(graph: Graph, in_eager: Iterable[Node]) -> None:
    """Gives the graph's output, and the nodes that stay in eager PyTorch, views of their own.

    Args:
        graph: Changed in place. The new nodes are marked `HANDED_OUT`; views that are no longer used are removed.
        in_eager: Nodes that do not run on OpenVINO.
    """
    copies: dict[Node, Node] = {}
    (output,) = graph.find_nodes(op="output")
    for node in in_eager:
        for source in node.all_input_nodes:
            apart = is_view(source) and (_is_given(base_of(source)) or not _is_dense(value_of(source)))
            if apart or _sets_strides(source):
                node.replace_input_with(source, _copied(source, copies))
    shared = Counter(base_of(source) for source in output.all_input_nodes)
    for source in output.all_input_nodes:
        base = base_of(source)
        if is_view(source) and (_is_given(base) or shared[base] > 1 or not _is_dense(value_of(source))):
            output.replace_input_with(source, _copied(source, copies))
    for node in reversed(graph.nodes):
        if not node.users and (is_view(node) or (node.op == "call_function" and is_symbolic_scalar(node))):
            graph.erase_node(node)


def computed_views(graph: Graph) -> list[list[int]]:
    """Returns the positions of outputs that are views of values computed in the graph, those of each view together."""
    (output,) = graph.find_nodes(op="output")
    values = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    positions: dict[Node, list[int]] = {}
    for position, value in enumerate(values):
        if isinstance(value, Node) and is_view(value) and not _is_given(base_of(value)):
            positions.setdefault(value, []).append(position)
    return list(positions.values())


def is_view(node: Node) -> bool:
    """Checks whether a node is a view of its first argument, or unpacks a tuple of such views."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _is_given(node: Node) -> bool:
    return node.op in {"placeholder", "get_attr"}


def base_of(node: Node) -> Node:
    """Returns the node that a node is a view of; the node itself if it is not a view."""
    while is_view(node):
        (node, *_) = node.args  # type: ignore[assignment]
    return node


def _sets_strides(node: Node) -> bool:
    """Checks whether a node only sets strides of a computed tensor.

    Strides of axes of size 1 are part of no memory order, but tell operators in eager PyTorch which format is meant: a
    global average of channels-last values is 1 x 1, and its strides still say channels last.
    """
    return node.target is aten.as_strided.default and is_view(node) and _is_dense(value_of(base_of(node)))


def _is_dense(value: Any) -> bool:
    """Checks whether a tensor fills memory from offset 0 without gaps, in any order of its dimensions."""
    if not isinstance(value, torch.Tensor):
        return True
    if example_of(value.storage_offset()) != 0:
        return False
    expected = 1
    for stride, size in sorted(pair for pair in zip(*example_strides(value), strict=True) if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _copied(node: Node, copies: dict[Node, Node]) -> Node:
    """Copies a view for eager PyTorch only; its base, and sizes that are inputs, are shared."""
    if node in copies:
        return copies[node]
    sized = node.op == "call_function" and is_symbolic_scalar(node)
    if not is_view(node) and not sized:
        return node
    arguments = {source: _copied(source, copies) for source in node.all_input_nodes}
    with node.graph.inserting_after(node):
        copy = node.graph.node_copy(node, arguments.__getitem__)
    # By name: the metadata of a copied graph holds a copy of the operator.
    origin = node.meta.get("original_aten")
    if (
        origin is not None
        and op_name(origin) == op_name(aten._unsafe_view.default)
        and copy.target is aten.view.default
    ):
        # Autograd makes a new tensor of each returned view, so one that is returned twice would come out as two.
        copy.target = aten._unsafe_view.default
    copy.meta = {**node.meta, HANDED_OUT: True}
    copies[node] = copy
    return copy
