"""Rewrites a partition's graph, just before its conversion, around OpenVINO faults that depend on shapes and values.

tests/contract/test_openvino.py pins these faults, except that of `_count_from_start`.
"""

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from torchserve_openvino.ops.names import arguments_of, tensors_of, value_of
from torchserve_openvino.ops.value_range import ValueRanges
from torchserve_openvino.passes.context import PassContext

aten = torch.ops.aten
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
_MIRRORED: dict[Any, Any] = {aten.gt.Tensor: aten.lt.Tensor, aten.ge.Tensor: aten.le.Tensor}
_MIRRORED |= {aten.gt.Scalar: aten.lt.Tensor, aten.ge.Scalar: aten.le.Tensor}


def rewrite(graph: Graph, context: PassContext) -> None:
    """Applies all rewrites in place.

    Args:
        graph: A partition's graph.
        context: Has the known ranges of its integers.
    """
    assert context.ranges is not None
    open_rows: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target is _ATTENTION:
            _zero_closed_rows(node, open_rows)
        elif node.target in _MIRRORED:
            _mirror(node)
        elif node.target in {aten.index.Tensor, aten._unsafe_index.Tensor}:
            _count_from_start(node, context.ranges)
        elif node.target is aten.arange.start_step:
            # Without it, OpenVINO counts in integers, from floats too.
            node.update_kwarg("dtype", value_of(node).dtype)
        else:
            _keep_reduced_dimensions(node)
    _separate_copies(graph)


def add_call(graph: Graph, op: Any, *args: Any, **kwargs: Any) -> Node:
    """Adds a node with its fake value at the graph's current insertion point."""
    node = graph.call_function(op, args, kwargs)
    node.meta["val"] = op(*torch.fx.node.map_arg(args, value_of), **kwargs)
    return node


def _replace(node: Node, new: Node) -> None:
    new.meta = {**node.meta, "val": value_of(node)}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _zero_closed_rows(node: Node, open_rows: dict[Node, Node]) -> None:
    """Sets attention rows whose mask excludes everything to 0, as in torch; they are NaN in OpenVINO."""
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


def _mirror(node: Node) -> None:
    """Rewrites ``x > y`` as ``y < x``: in OpenVINO's CPU plugin, NaN is greater than anything, but not less."""
    x, y = node.args[:2]
    tensors = tensors_of([value_of(source) for source in node.all_input_nodes])
    floats = isinstance(y, float) or any(tensor.is_floating_point() for tensor in tensors)
    if not isinstance(x, Node) or not floats:
        return
    with node.graph.inserting_before(node):
        if not isinstance(y, Node):
            dtype = value_of(x).dtype if value_of(x).is_floating_point() else torch.float32
            y = add_call(node.graph, aten.full.default, [], y, dtype=dtype)
        _replace(node, node.graph.call_function(_MIRRORED[node.target], (y, x)))


def _count_from_start(node: Node, ranges: ValueRanges) -> None:
    """Makes negative indices positive: of several index tensors, OpenVINO counts only the first one's from the end."""
    source, indices = node.args[:2]
    assert isinstance(source, Node) and isinstance(indices, (list, tuple))
    if sum(index is not None for index in indices) < 2:
        return
    graph, counted = node.graph, list(indices)
    for dim, index in enumerate(indices):
        known = ranges.of(index)
        integer = isinstance(index, Node) and value_of(index).dtype in {torch.int64, torch.int32}
        if not integer or (known is not None and known[0] >= 0):
            continue
        with graph.inserting_before(node):
            negative = add_call(graph, aten.lt.Scalar, index, 0)
            moved = add_call(graph, aten.add.Tensor, index, size_of(graph, source, dim))
            counted[dim] = add_call(graph, aten.where.self, negative, moved, index)
    node.args = (source, counted, *node.args[2:])


def size_of(graph: Graph, source: Node, dim: int) -> Any:
    """Returns the size of a dimension: a number, or a node if it is symbolic."""
    size = value_of(source).shape[dim]
    return size if isinstance(size, int) else add_call(graph, aten.sym_size.int, source, dim)


def _keep_reduced_dimensions(node: Node) -> None:
    """Makes a reduction over symbolic sizes keep its dimensions, and removes them with a squeeze.

    OpenVINO's CPU plugin merges a reduction that drops dimensions with the transpose or reshape after it, and returns
    the shape from before that operator (tests/contract pins it).
    """
    op: Any = node.target
    schema, given, value = op._schema.arguments, arguments_of(node), value_of(node)
    dims = given.get("dim")
    plain = isinstance(value, torch.Tensor) and any(argument.name == "keepdim" for argument in schema)
    if not plain or given.get("keepdim") or dims is None or dims == [] or not node.all_input_nodes:
        return
    source = value_of(node.all_input_nodes[0])
    if all(isinstance(size, int) for size in source.shape):
        return
    reduced = sorted(dim % source.dim() for dim in ([dims] if isinstance(dims, int) else dims))
    given["keepdim"] = True
    before = [argument for argument in schema if not argument.kwarg_only]
    before = before[: max(i for i, argument in enumerate(before) if argument.name in given) + 1]
    arguments = tuple(given.get(argument.name, argument.default_value) for argument in before)
    named = {
        argument.name: given[argument.name] for argument in schema if argument.kwarg_only and argument.name in given
    }
    with node.graph.inserting_before(node):
        kept = add_call(node.graph, op, *arguments, **named)
        kept.meta = {**node.meta, "val": value_of(kept)}
        _replace(node, node.graph.call_function(aten.squeeze.dims, (kept, reduced)))


def _separate_copies(graph: Graph) -> None:
    """Makes each returned copy of a value an operation: OpenVINO's frontend fails if two outputs are one tensor."""
    (output,) = graph.find_nodes(op="output")
    returned: set[Node] = set()
    for node in output.all_input_nodes:
        source = node
        while source.op == "call_function" and source.target is aten.clone.default and value_of(source).dim():
            source = source.all_input_nodes[0]
        if source in returned and source is not node:
            with graph.inserting_before(node):
                _replace(node, graph.call_function(aten.cat.default, ([source],)))
        returned.add(source)
