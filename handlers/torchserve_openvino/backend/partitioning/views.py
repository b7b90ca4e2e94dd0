"""Views that leave the graph are made by torch: a view is another look at memory, and OpenVINO would make a copy.

AOTAutograd rebuilds an output that shares memory with an input (or with another output) from the strides and the offset
of what the graph returns, so that a contiguous copy in its place means wrong values. A view that is returned, or that
an operator in eager PyTorch takes (it may answer another view of it, or take its layout over), is therefore made
in the outer graph, where it costs nothing: of inputs and weights always, of computed values where another output shares
their memory, or where OpenVINO can't lay it out in memory as torch does. It computes nothing, and does not count as an
operator.
"""

import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from torchserve_openvino.ops.memory_order import example_of, example_strides
from torchserve_openvino.ops.names import HANDED_OUT, is_symbolic_scalar, value_of


def hand_out_views(graph: Graph, in_eager: Iterable[Node]) -> None:
    """Gives the graph's output, and nodes that stay in eager PyTorch, views of their own.

    Args:
        graph: Changed in place. The new nodes carry the mark `HANDED_OUT`; views that nobody needs any more are gone.
        in_eager: Nodes that OpenVINO does not run.
    """
    made: dict[Node, Node] = {}
    (output,) = graph.find_nodes(op="output")
    for node in in_eager:
        for source in node.all_input_nodes:
            if is_view(source) and (_is_given(base_of(source)) or not _is_dense(value_of(source))):
                node.replace_input_with(source, _copied(source, made))
    shared = Counter(base_of(source) for source in output.all_input_nodes)
    for source in output.all_input_nodes:
        base = base_of(source)
        if is_view(source) and (_is_given(base) or shared[base] > 1 or not _is_dense(value_of(source))):
            output.replace_input_with(source, _copied(source, made))
    for node in reversed(graph.nodes):
        if not node.users and (is_view(node) or (node.op == "call_function" and is_symbolic_scalar(node))):
            graph.erase_node(node)


def is_view(node: Node) -> bool:
    """Whether a node gives its first argument's memory another name, or unpacks such names."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _is_given(node: Node) -> bool:
    return node.op in {"placeholder", "get_attr"}


def base_of(node: Node) -> Node:
    """What a node is a view of; itself where it is none."""
    while is_view(node):
        (node, *_) = node.args  # type: ignore[assignment]
    return node


def _is_dense(value: Any) -> bool:
    """Whether a tensor fills memory from its start without gaps, in whatever order of its dimensions."""
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


def _copied(node: Node, made: dict[Node, Node]) -> Node:
    """The same view once more, for eager PyTorch alone; its base, and sizes that are inputs, are shared."""
    if node in made:
        return made[node]
    sized = node.op == "call_function" and is_symbolic_scalar(node)
    if not is_view(node) and not sized:
        return node
    arguments = {source: _copied(source, made) for source in node.all_input_nodes}
    with node.graph.inserting_after(node):
        copy = node.graph.node_copy(node, arguments.__getitem__)
    copy.meta = {**node.meta, HANDED_OUT: True}
    made[node] = copy
    return copy
