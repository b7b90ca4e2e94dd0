"""Counting in floats: OpenVINO counts in integers where `arange` names no dtype."""

import torch
from torch.fx import Graph

from torchserve_openvino.ops.names import value_of
from torchserve_openvino.passes.pass_context import PassContext

aten = torch.ops.aten


def name_dtype_of_counts(graph: Graph, _: PassContext) -> None:
    """Names the dtype of each `arange`."""
    for node in graph.find_nodes(op="call_function", target=aten.arange.start_step):
        node.update_kwarg("dtype", value_of(node).dtype)
