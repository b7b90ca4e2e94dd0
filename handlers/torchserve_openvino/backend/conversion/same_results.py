"""Whether the frontend gave each operator's result the type and shape that torch gave it.

What only differs at the end is set right there (`convert._fit_outputs`), but what is computed in between is not: the
frontend once left a running sum of booleans boolean, and its square became a logical "and"; and it took a dimension of
symbolic size for one that a squeeze takes away, so that an operator that counts dimensions wrote to another place.
"""

import openvino as ov
import torch
from torch.fx import Graph, Node

from torchserve_openvino.backend.spec import ValueSpec, spec_of
from torchserve_openvino.ops.names import op_name, value_of


def refuse_other_results(model: ov.Model, graph: Graph) -> None:
    """Looks at each operator's result where the next operator takes it.

    Args:
        model: As the frontend converted ``graph``; it names what it makes of a node ``node/operator/...``.

    Raises:
        RuntimeError: A type or shape differs; the message names the operator.
    """
    nodes = {node.name: node for node in graph.nodes if node.op == "call_function"}
    operations = model.get_ordered_ops()
    made = {name for name, operator in map(_origin, operations) if operator}
    takes = {name: _takes(node, made) for name, node in nodes.items()}
    for operation in operations:
        name, operator = _origin(operation)
        node = nodes.get(name)
        if node is None or not operator or not isinstance(value_of(node), torch.Tensor):
            continue
        wanted = spec_of(value_of(node))
        for output in operation.outputs():
            users = {_origin(port.get_node())[0] for port in output.get_target_inputs()}
            # The frontend makes one operation of two slices that are written to: then parts of either serve the other.
            if not any(user not in takes or node in takes[user] for user in users - {name}):
                continue
            if difference := _difference(output, wanted):
                raise RuntimeError(f"{op_name(node.target)} becomes {difference} in torch")


def _origin(operation: ov.Node) -> tuple[str, str]:
    """The node that an operation was made of, and the rest of its name; that is empty for what is not made of one."""
    name, _, rest = operation.get_friendly_name().partition("/")
    return name, rest


def _takes(node: Node, made: set[str]) -> set[Node]:
    """The nodes whose results a node takes; through those that OpenVINO has no operation for."""
    found: set[Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        source = waiting.pop()
        if source not in found:
            found.add(source)
            waiting += source.all_input_nodes if source.name not in made else []
    return found


def _difference(output: ov.Output, wanted: ValueSpec) -> str:
    if output.get_element_type() != wanted.ov_type:
        return f"{output.get_element_type()} in OpenVINO, {wanted.ov_type}"
    if not output.get_partial_shape().compatible(ov.PartialShape(list(wanted.shape))):
        return f"{output.get_partial_shape()} in OpenVINO, {list(wanted.shape)}"
    return ""
