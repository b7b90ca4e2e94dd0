"""Makes weights constants: OpenVINO would neither fold nor pack them as inputs, which they are for AOTAutograd."""

from torch.fx import Graph

from torchserve_openvino.passes.pass_context import PassContext


def insert_constants(graph: Graph, context: PassContext) -> None:
    """Replaces the placeholders of weights with ``get_attr`` nodes, in place."""
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        if position not in context.constants:
            continue
        name = f"constant_{position}"
        context.tensors[name] = context.constants[position].detach()
        with graph.inserting_before(node):
            attribute = graph.get_attr(name)
        attribute.meta = dict(node.meta)
        node.replace_all_uses_with(attribute)
        graph.erase_node(node)
