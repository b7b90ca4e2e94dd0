"""Checks that the frontend gave each operator's result the element type and shape that torch gave it.

Output types that differ are converted (`convert._fit_outputs`), but intermediate results are not: the frontend once
left a cumulative sum of booleans boolean, so that its square became a logical "and"; and it once let a squeeze remove
a dimension of symbolic size, so that a later operator wrote along the wrong dimension.
"""

import openvino as ov
import torch
from torch.fx import Graph, Node

from torchserve_openvino.backend.spec import ValueSpec, spec_of
from torchserve_openvino.ops.names import op_name, value_of

_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default}


def refuse_other_results(model: ov.Model, graph: Graph) -> None:
    """Compares each operator's result, where another operator takes it, with torch's.

    Args:
        model: The frontend's conversion of ``graph``; it names the operations of a node ``node/operator/...``.
        graph: The converted graph, with fake values.

    Raises:
        RuntimeError: A type or shape differs; the message names the operator.
    """
    nodes = {node.name: node for node in graph.nodes if node.op == "call_function"}
    operations = model.get_ordered_ops()
    converted = {name for name, operator in map(_origin, operations) if operator}
    takes = {name: _takes(node, converted) for name, node in nodes.items()}
    for operation in operations:
        name, operator = _origin(operation)
        node = nodes.get(name)
        if node is None or not operator or not isinstance(value_of(node), torch.Tensor):
            continue
        specs = [spec_of(value) for value in _values(node)]
        for output in operation.outputs():
            users = {_origin(port.get_node())[0] for port in output.get_target_inputs()}
            # The frontend merges two slices that are written to into one operation; parts of each then serve the other.
            if not any(user not in takes or node in takes[user] for user in users - {name}):
                continue
            differences = [_difference(output, spec) for spec in specs]
            if all(differences):
                difference = differences[0]
                raise RuntimeError(f"{op_name(node.target)} becomes {difference} in torch")


def _values(node: Node) -> list[torch.Tensor]:
    """Returns the fake values that a node's operation may have.

    The frontend drops views before and after a softmax that cancel out, and computes it in the shape between them.
    """
    values: list[torch.Tensor] = [value_of(node)]
    if node.target is torch.ops.aten._softmax.default:
        values += [value_of(user) for user in node.users if user.target in _VIEWS]
    return values


def _origin(operation: ov.Node) -> tuple[str, str]:
    """Returns the name of the node that an operation comes from, and the rest of its name: empty if from no node."""
    name, _, rest = operation.get_friendly_name().partition("/")
    return name, rest


def _takes(node: Node, converted: set[str]) -> set[Node]:
    """Returns the nodes whose results a node takes, looking through nodes that have no operation in OpenVINO."""
    sources: set[Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        source = waiting.pop()
        if source not in sources:
            sources.add(source)
            waiting += source.all_input_nodes if source.name not in converted else []
    return sources


def _difference(output: ov.Output, spec: ValueSpec) -> str:
    if output.get_element_type() != spec.ov_type:
        return f"{output.get_element_type()} in OpenVINO, {spec.ov_type}"
    if not output.get_partial_shape().compatible(ov.PartialShape(list(spec.shape))):
        return f"{output.get_partial_shape()} in OpenVINO, {list(spec.shape)}"
    return ""
