"""Keeps -inf and NaN in max pooling: for a window of -inf OpenVINO returns the least finite float, and NaN is lost.

A second pooling tells what a window holds: 0 for -inf alone, 2 for a NaN, 1 otherwise. It is left out behind operators
whose results are never -inf, such as the activations in front of most pools of image models, and in front of `relu`.
(NaN is then lost, as it is in OpenVINO's `relu`.) The indices of windows of -inf or NaN are wrong as well: a check
leaves such calls to eager PyTorch.
"""

import math
import operator

import torch
from torch.fx import Graph, Node

from torchserve_openvino.config.op_names import packet_name
from torchserve_openvino.ops.names import arguments_of, op_name, packets, value_of
from torchserve_openvino.passes.fx.nodes import add_call
from torchserve_openvino.passes.pass_context import PassContext

aten = torch.ops.aten
POOLS = (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
# Their values are right, but for a single one without its index; of several NaN they return another index.
ADAPTIVE_POOLS = (aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
# Never return -inf, whatever their input.
_BOUNDED = packets("relu relu6 sigmoid hardsigmoid silu gelu hardswish elu mish tanh softplus exp abs _softmax") | {
    "quantized_decomposed.dequantize_per_tensor", "quantized_decomposed.dequantize_per_channel",
}  # fmt: skip
_RECTIFIERS = packets("relu relu6")
_CLAMPS = packets("clamp clamp_min hardtanh")
# Key in the ``meta`` of what a second pooling pools.
_CONTENT = "openvino_window_content"
_MOVES = packets("cat view _unsafe_view unsqueeze squeeze permute transpose clone slice expand _to_copy")


def is_bounded(node: Node, depth: int = 8) -> bool:
    """Returns True if no value of a node is -inf."""
    if node.op != "call_function" or not depth:
        return False
    name = packet_name(op_name(node.target))
    if name in _BOUNDED or _CONTENT in node.meta:
        return True
    if name in _CLAMPS:
        return _has_least(node)
    pools = node.target in POOLS or node.target is operator.getitem or name in _MOVES
    return pools and all(is_bounded(source, depth - 1) for source in node.all_input_nodes)


def _has_least(node: Node) -> bool:
    """Returns True if a clamp has a lower limit."""
    return arguments_of(node).get("min", arguments_of(node).get("min_val")) not in {None, -math.inf}


def _hides_least(node: Node) -> bool:
    """Returns True if a node computes the same of -inf and of the least finite float; NaN is lost there in any case."""
    name = packet_name(op_name(node.target)) if node.op == "call_function" else ""
    return name in _RECTIFIERS or (name in _CLAMPS and _has_least(node))


def keep_infinities(graph: Graph, _: PassContext) -> None:
    """Replaces the values of windows of -inf and of windows with NaN, in place."""
    for node in list(graph.nodes):
        if node.target not in POOLS and not _is_global_maximum(node):
            continue
        source = node.all_input_nodes[0]
        if value_of(source).dtype is torch.bfloat16 and _uses_indices(node):
            _pool_wide(node)
        if value_of(source).is_floating_point() and not is_bounded(source):
            _restore(node)


def needs_numbers(node: Node) -> bool:
    """Returns True if a pool's indices are right only where each of its windows has a largest number."""
    if node.target not in (*POOLS, *ADAPTIVE_POOLS) or not _uses_indices(node):
        return False
    source = node.all_input_nodes[0]
    return value_of(source).is_floating_point() and (node.target in ADAPTIVE_POOLS or not is_bounded(source))


def _is_global_maximum(node: Node) -> bool:
    """Returns True if a node is an adaptive pool to one value of each channel, whose index is not used."""
    return node.target in ADAPTIVE_POOLS and set(node.args[1]) == {1} and not _uses_indices(node)  # type: ignore[arg-type]


def _uses_indices(node: Node) -> bool:
    return any(user.target is not operator.getitem or user.args[1] == 1 for user in node.users)


def holds_numbers(graph: Graph, node: Node) -> Node:
    """Adds the condition that each window of a pool has a largest number."""
    if node.target in ADAPTIVE_POOLS:
        return add_call(graph, aten.eq.Tensor, node.args[0], node.args[0])
    return add_call(graph, aten.eq.Scalar, _content(graph, node), 1.0)


def _content(graph: Graph, node: Node) -> Node:
    """Adds the second pooling at the graph's insertion point."""
    x, *arguments = node.args
    is_open = add_call(graph, aten.ne.Scalar, x, -math.inf)
    is_nan = add_call(graph, aten.ne.Tensor, x, x)
    kinds = [add_call(graph, aten._to_copy.default, flag, dtype=torch.float32) for flag in (is_open, is_nan)]
    content = add_call(graph, aten.add.Tensor, *kinds)
    content.meta[_CONTENT] = True
    pooled = add_call(graph, node.target, content, *arguments, **node.kwargs)
    return add_call(graph, operator.getitem, pooled, 0)


def _restore(node: Node) -> None:
    graph = node.graph
    for item in [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]:
        if all(map(_hides_least, item.users)):
            continue
        with graph.inserting_before(item.next):
            content = _content(graph, node)
            closed = add_call(graph, aten.lt.Scalar, content, 0.5)
            undefined = add_call(graph, aten.ge.Scalar, content, 1.5)
            restored = add_call(graph, aten.masked_fill.Scalar, item, closed, -math.inf)
            result = add_call(graph, aten.masked_fill.Scalar, restored, undefined, math.nan)
        _replace_uses(item, result, restored)


def _pool_wide(node: Node) -> None:
    """Pools bfloat16 as float32: OpenVINO does not compile bfloat16 with indices."""
    graph, x = node.graph, node.all_input_nodes[0]
    with graph.inserting_before(node):
        node.replace_input_with(x, add_call(graph, aten._to_copy.default, x, dtype=torch.float32))
    node.meta["val"] = (value_of(node)[0].float(), value_of(node)[1])
    for item in [user for user in node.users if user.args[1] == 0]:
        narrow = value_of(item)
        item.meta["val"] = narrow.float()
        with graph.inserting_after(item):
            back = graph.call_function(aten._to_copy.default, (item,), {"dtype": torch.bfloat16})
        back.meta["val"] = narrow
        _replace_uses(item, back, back)


def _replace_uses(item: Node, result: Node, first: Node) -> None:
    """Replaces a value by ``result``, but not in ``first``, which it is computed from."""
    result.meta = {**item.meta, "val": value_of(result)}
    item.replace_all_uses_with(result, delete_user_cb=lambda user: user is not first)
