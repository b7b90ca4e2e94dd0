"""Removes nodes that only rename a tensor, and then duplicate outputs: OpenVINO's frontend fails on both."""

from torch.fx import Graph

from torchserve_openvino.ops.names import RENAMES, op_name
from torchserve_openvino.passes.pass_context import PassContext


def drop_renames(graph: Graph, context: PassContext) -> None:
    """Removes them in place, and sets `PassContext.order`."""
    for node in graph.nodes:
        if node.op == "call_function" and op_name(node.target) in RENAMES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    (output,) = graph.find_nodes(op="output")
    value = output.args[0]
    nodes = list(value) if isinstance(value, (list, tuple)) else [value]
    unique = list(dict.fromkeys(nodes))
    output.args = (tuple(unique),)
    context.order = tuple(unique.index(node) for node in nodes)
