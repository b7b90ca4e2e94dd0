"""Whether the frontend kept the types that torch gave to each operator's result.

A type that only changes at the end is set right there (`convert._fit_outputs`), but what is computed in between is not:
the frontend once left a running sum of booleans boolean, and its square became a logical "and".
"""

import openvino as ov
import torch
from torch.fx import Graph

from torchserve_openvino.backend.spec import spec_of
from torchserve_openvino.ops.names import op_name, value_of


def refuse_other_types(model: ov.Model, graph: Graph) -> None:
    """Looks at each operator's result where the next operator takes it.

    Args:
        model: As the frontend converted ``graph``; it names what it makes of a node ``node/operator/...``.

    Raises:
        RuntimeError: A type differs; the message names the operator.
    """
    nodes = {node.name: node for node in graph.nodes if node.op == "call_function"}
    for made in model.get_ordered_ops():
        node_name, _, rest = made.get_friendly_name().partition("/")
        node = nodes.get(node_name)
        if node is None or not rest or not isinstance(value_of(node), torch.Tensor):
            continue
        inside = f"{node_name}/"
        for output in made.outputs():
            if all(port.get_node().get_friendly_name().startswith(inside) for port in output.get_target_inputs()):
                continue
            wanted, found = spec_of(value_of(node)).ov_type, output.get_element_type()
            if found != wanted:
                raise RuntimeError(f"{op_name(node.target)} becomes {found} in OpenVINO, {wanted} in torch")
