"""Which layers of a quantised graph compute in 8 bits, and the same graph with some of them left in f32."""

import copy
from collections.abc import Collection, Iterator

from torch.fx import Graph, GraphModule, Node

from torchserve_openvino.ops.names import op_name

_QUANTIZE, _DEQUANTIZE = "quantized_decomposed.quantize_per_", "quantized_decomposed.dequantize_per_"


def layers_of(model: GraphModule) -> list[str]:
    """Returns the names of the nodes that take quantised activations, in their order."""
    return [node.name for node in model.graph.nodes if any(True for _ in _quantised_inputs(node))]


def _quantised_inputs(node: Node) -> Iterator[tuple[Node, Node]]:
    """Yields the inputs of a node that are quantised and dequantised again, and what they were before."""
    if node.op != "call_function" or _is(node, _QUANTIZE) or _is(node, _DEQUANTIZE):
        return
    for source in node.all_input_nodes:
        before = source.args[0] if _is(source, _DEQUANTIZE) else None
        if not (isinstance(before, Node) and _is(before, _QUANTIZE)):
            continue
        first = before.args[0]
        # A constant is a weight.
        if isinstance(first, Node) and first.op != "get_attr":
            yield source, first


def _is(node: Node, prefix: str) -> bool:
    return node.op == "call_function" and op_name(node.target).startswith(prefix)


def without(model: GraphModule, names: Collection[str]) -> GraphModule:
    """Returns a model in which some layers take their activations as they are; it shares the weights.

    Args:
        model: A quantised model; stays as it is.
        names: From `layers_of`. Their weights stay in 8 bits, and are dequantised.
    """
    graph = Graph()
    nodes: dict[Node, Node] = {}
    graph.output(graph.graph_copy(model.graph, nodes))
    graph._codegen = copy.copy(model.graph._codegen)
    for old, node in list(nodes.items()):
        if old.name in names:
            for source, before in list(_quantised_inputs(node)):
                node.replace_input_with(source, before)
    shortened = GraphModule(model, graph)
    # Not before: whether a module's call has side effects, the module says.
    shortened.graph.eliminate_dead_code()
    shortened.recompile()
    return shortened
