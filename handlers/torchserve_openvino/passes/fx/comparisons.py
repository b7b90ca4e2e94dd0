"""Comparisons with NaN: in OpenVINO's CPU plugin, NaN is greater than anything, but not less (tests/contract)."""

from typing import Any

import torch
from torch.fx import Graph, Node

from torchserve_openvino.ops.names import tensors_of, value_of
from torchserve_openvino.passes.fx.nodes import add_call, replace
from torchserve_openvino.passes.pass_context import PassContext

aten = torch.ops.aten
_MIRRORED: dict[Any, Any] = {aten.gt.Tensor: aten.lt.Tensor, aten.ge.Tensor: aten.le.Tensor}
_MIRRORED |= {aten.gt.Scalar: aten.lt.Tensor, aten.ge.Scalar: aten.le.Tensor}


def mirror_comparisons(graph: Graph, _: PassContext) -> None:
    """Rewrites ``x > y`` as ``y < x``."""
    for node in [node for target in _MIRRORED for node in graph.find_nodes(op="call_function", target=target)]:
        _mirror(node)


def _mirror(node: Node) -> None:
    x, y = node.args[:2]
    tensors = tensors_of([value_of(source) for source in node.all_input_nodes])
    floats = isinstance(y, float) or any(tensor.is_floating_point() for tensor in tensors)
    if not isinstance(x, Node) or not floats:
        return
    with node.graph.inserting_before(node):
        if not isinstance(y, Node):
            dtype = value_of(x).dtype if value_of(x).is_floating_point() else torch.float32
            y = add_call(node.graph, aten.full.default, [], y, dtype=dtype)
        replace(node, node.graph.call_function(_MIRRORED[node.target], (y, x)))
