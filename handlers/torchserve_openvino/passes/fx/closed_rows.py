"""Attention rows whose mask excludes everything: 0 in torch, NaN in OpenVINO (tests/contract/test_openvino.py)."""

import math

import torch
from torch.fx import Graph, Node

from torchserve_openvino.ops.names import arguments_of, value_of
from torchserve_openvino.passes.fx.nodes import add_call
from torchserve_openvino.passes.pass_context import PassContext

aten = torch.ops.aten
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


def zero_closed_rows(graph: Graph, _: PassContext) -> None:
    """Sets attention rows whose mask excludes everything to 0."""
    open_rows: dict[Node, Node] = {}
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        _zero_closed_rows(node, open_rows)


def _zero_closed_rows(node: Node, open_rows: dict[Node, Node]) -> None:
    mask = arguments_of(node).get("attn_mask")
    if not isinstance(mask, Node):
        return
    graph = node.graph
    with graph.inserting_before(node):
        if mask not in open_rows:
            allowed = add_call(graph, aten.ne.Scalar, mask, -math.inf)
            open_rows[mask] = add_call(graph, aten.any.dim, allowed, -1, True)
        zero = add_call(graph, aten.full.default, [], 0.0, dtype=value_of(node)[0].dtype)
    for item in list(node.users):
        if item.args[1] == 0:
            with graph.inserting_after(item):
                masked = graph.call_function(aten.where.self, (open_rows[mask], item, zero))
            masked.meta = dict(item.meta)
            for user in [user for user in item.users if user is not masked]:
                user.replace_input_with(item, masked)
