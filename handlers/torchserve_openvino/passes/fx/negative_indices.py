"""Negative indices: of several index tensors, OpenVINO counts only the first one's from the end."""

import torch
from torch.fx import Graph, Node

from torchserve_openvino.ops.names import value_of
from torchserve_openvino.ops.value_range import ValueRanges
from torchserve_openvino.passes.fx.nodes import add_call, size_of
from torchserve_openvino.passes.pass_context import PassContext

aten = torch.ops.aten


def count_from_start(graph: Graph, context: PassContext) -> None:
    """Makes the indices of several index tensors positive, where the known ranges of integers do not show it."""
    assert context.ranges is not None
    for target in (aten.index.Tensor, aten._unsafe_index.Tensor):
        for node in graph.find_nodes(op="call_function", target=target):
            _count_from_start(node, context.ranges)


def _count_from_start(node: Node, ranges: ValueRanges) -> None:
    source, indices = node.args[:2]
    assert isinstance(source, Node) and isinstance(indices, (list, tuple))
    if sum(index is not None for index in indices) < 2:
        return
    graph, counted = node.graph, list(indices)
    for dim, index in enumerate(indices):
        known = ranges.of(index)
        integer = isinstance(index, Node) and value_of(index).dtype in {torch.int64, torch.int32}
        if not integer or (known is not None and known[0] >= 0):
            continue
        with graph.inserting_before(node):
            negative = add_call(graph, aten.lt.Scalar, index, 0)
            moved = add_call(graph, aten.add.Tensor, index, size_of(graph, source, dim))
            counted[dim] = add_call(graph, aten.where.self, negative, moved, index)
    node.args = (source, counted, *node.args[2:])
