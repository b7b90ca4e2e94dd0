"""Removes what changes nothing.

These are checks of types and devices, which a graph's guards or its signature determine, and casts to a wider type and
back: scales of dynamic quantization are float64, in which OpenVINO has none.
"""

import torch
from torch.fx import Graph, Node

from torchserve_openvino.ops.memory_order import example_strides
from torchserve_openvino.ops.names import value_of
from torchserve_openvino.passes.fx.nodes import is_returned, may_be_view
from torchserve_openvino.passes.pass_context import PassContext

_CAST = torch.ops.aten._to_copy.default
# Types that hold all values of others exactly.
_HOLDS = {
    torch.float64: {torch.float32, torch.float16, torch.bfloat16},
    torch.float32: {torch.float16, torch.bfloat16},
    torch.int64: {torch.int32, torch.int16, torch.int8, torch.uint8},
    torch.int32: {torch.int16, torch.int8, torch.uint8},
}


def drop_checks(graph: Graph, _: PassContext) -> None:
    """Removes `_assert_tensor_metadata`, which torch.export inserts, in place."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)


def drop_round_trips(graph: Graph, _: PassContext) -> None:
    """Lets the users of a tensor that was cast to a wider type and back take the tensor itself.

    A result of the graph, or what a result may be a view of, stays a tensor of its own.

    Args:
        graph: A lowered graph; changed in place.
        _: Not needed.
    """
    for node in list(graph.nodes):
        if not _casts(node):
            continue
        wide = node.args[0]
        if not (isinstance(wide, Node) and _casts(wide) and isinstance(wide.args[0], Node)):
            continue
        first = wide.args[0]
        before, between, after = (_dtype(cast) for cast in (first, wide, node))
        if between is None or before is not after or before not in _HOLDS.get(between, ()):
            continue
        # Views of the copy need not be possible of what was copied.
        moved = example_strides(value_of(first)) != example_strides(value_of(node))
        node.replace_all_uses_with(
            first, delete_user_cb=lambda user, moved=moved: not (_returns(user) or (moved and may_be_view(user)))
        )
        if node.users:
            node.target, node.args, node.kwargs = torch.ops.aten.clone.default, (first,), {}
    for node in reversed(list(graph.nodes)):
        if not node.users and _casts(node):
            graph.erase_node(node)


def _returns(user: Node) -> bool:
    return user.op == "output" or (may_be_view(user) and is_returned(user))


def _casts(node: Node) -> bool:
    return node.op == "call_function" and node.target is _CAST and set(node.kwargs) <= {"dtype"}


def _dtype(node: Node) -> torch.dtype | None:
    value = value_of(node)
    return value.dtype if isinstance(value, torch.Tensor) else None
