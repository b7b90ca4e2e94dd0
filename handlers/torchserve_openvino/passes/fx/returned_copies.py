"""Copies that a graph returns: OpenVINO's frontend fails if two outputs are one tensor."""

import torch
from torch.fx import Graph, Node

from torchserve_openvino.ops.names import value_of
from torchserve_openvino.passes.fx.nodes import replace
from torchserve_openvino.passes.pass_context import PassContext

aten = torch.ops.aten


def separate_copies(graph: Graph, _: PassContext) -> None:
    """Makes each returned copy of a value an operation."""
    (output,) = graph.find_nodes(op="output")
    returned: set[Node] = set()
    for node in output.all_input_nodes:
        source = node
        while source.op == "call_function" and source.target is aten.clone.default and value_of(source).dim():
            source = source.all_input_nodes[0]
        if source in returned and source is not node:
            with graph.inserting_before(node):
                replace(node, graph.call_function(aten.cat.default, ([source],)))
        returned.add(source)
