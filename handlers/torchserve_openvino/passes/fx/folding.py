"""Computes in torch what depends on no input and casts floats to integers.

Such a cast may get a value that no integer holds, whose result is not used: T5's buckets of distances take the
logarithm of 0 for the distance 0, and then choose the distance itself. A check of the cast (`checks.py`) would fail at
each call.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from torchserve_openvino.ops.names import value_of
from torchserve_openvino.passes.fx.int_range import is_cast_from_float
from torchserve_openvino.passes.pass_context import PassContext

# A larger constant is not worth its memory.
_MOST_BYTES = 64 * 2**20


def fold_casts(graph: Graph, context: PassContext) -> None:
    """Replaces results of such computations with constants.

    Args:
        graph: A partition's graph; changed in place.
        context: Gets the tensors of new ``get_attr`` nodes.
    """
    # Nodes that depend on no input, and whether they depend on a cast.
    closed: dict[Node, bool] = {}
    for node in graph.nodes:
        if _is_closed(node, closed):
            closed[node] = is_cast_from_float(node) or any(closed[source] for source in node.all_input_nodes)
    outermost = [node for node, casts in closed.items() if casts and any(user not in closed for user in node.users)]
    values = _computed(outermost)
    for node in outermost:
        value = values[node]
        # A fake tensor, if a tracing mode is on, has no values.
        if type(value) is not torch.Tensor or value.nbytes > _MOST_BYTES:
            continue
        name = f"folded_{node.name}"
        context.tensors[name] = value
        with graph.inserting_before(node):
            attribute = graph.get_attr(name)
        attribute.meta = dict(node.meta)
        node.replace_all_uses_with(attribute)
    for node in reversed(closed):
        if not node.users:
            graph.erase_node(node)


def _is_closed(node: Node, closed: dict[Node, bool]) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.is_mutable:
        return False
    value = value_of(node)
    known = isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)
    return known and all(source in closed for source in node.all_input_nodes)


def _computed(outermost: Iterable[Node]) -> dict[Node, Any]:
    """Returns the values of nodes that depend on no input, and of all that they depend on."""
    values: dict[Node, Any] = {}
    waiting = list(outermost)
    while waiting:
        node = waiting[-1]
        missing = [source for source in node.all_input_nodes if source not in values]
        if node in values or missing:
            waiting += missing
            if not missing:
                waiting.pop()
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        assert callable(node.target)
        values[node] = node.target(*args, **kwargs)
        waiting.pop()
    return values
