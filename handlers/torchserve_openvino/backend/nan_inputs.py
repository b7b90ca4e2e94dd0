"""Which inputs must hold no NaN, so that OpenVINO computes a partition as torch does.

OpenVINO's CPU plugin does not propagate NaN through every operator: relu, clamp, maximum, max pooling, exp and softmax
may return a number for it. A call whose input holds NaN therefore runs in eager PyTorch, counted; unless the subgraph
itself asks where the input is NaN, and so replaces it, as models of incomplete records do.
"""

import torch
from torch.fx import GraphModule, Node

from torchserve_openvino.ops.movement import HANDS_ON
from torchserve_openvino.ops.names import op_name, packet_name, packets, tensors_of, value_of

_ASKS = packets("isnan nan_to_num")
_COMPARES = packets("eq ne")


def inputs_without_nan(graph: GraphModule) -> frozenset[str]:
    """Names of the float placeholders that must hold no NaN."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    return frozenset(node.name for node in placeholders if _is_float(node) and not _is_asked(node))


def _is_float(node: Node) -> bool:
    return any(tensor.is_floating_point() for tensor in tensors_of(value_of(node)))


def _is_asked(node: Node) -> bool:
    """Whether the graph looks for NaN in a value, or in what only moves it."""
    for user in node.users:
        if user.op != "call_function":
            continue
        name = packet_name(op_name(user.target))
        # x != x is true of NaN alone.
        if name in _ASKS or (name in _COMPARES and user.args[:2] == (node, node)):
            return True
        if name in HANDS_ON and isinstance(value_of(user), torch.Tensor) and _is_asked(user):
            return True
    return False
