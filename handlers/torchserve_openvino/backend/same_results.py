"""Whether the frontend gave each operator's result the type and shape that torch gave it.

What only differs at the end is set right there (`convert._fit_outputs`), but what is computed in between is not: the
frontend once left a running sum of booleans boolean, and its square became a logical "and"; and it took a dimension of
symbolic size for one that a squeeze takes away, so that an operator that counts dimensions wrote to another place.
"""

import openvino as ov
import torch
from torch.fx import Graph

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
    for made in model.get_ordered_ops():
        node_name, _, rest = made.get_friendly_name().partition("/")
        node = nodes.get(node_name)
        if node is None or not rest or not isinstance(value_of(node), torch.Tensor):
            continue
        inside = f"{node_name}/"
        wanted = spec_of(value_of(node))
        for output in made.outputs():
            if all(port.get_node().get_friendly_name().startswith(inside) for port in output.get_target_inputs()):
                continue
            if difference := _difference(output, wanted):
                raise RuntimeError(f"{op_name(node.target)} becomes {difference} in torch")


def _difference(output: ov.Output, wanted: ValueSpec) -> str:
    if output.get_element_type() != wanted.ov_type:
        return f"{output.get_element_type()} in OpenVINO, {wanted.ov_type}"
    if not output.get_partial_shape().compatible(ov.PartialShape(list(wanted.shape))):
        return f"{output.get_partial_shape()} in OpenVINO, {list(wanted.shape)}"
    return ""
