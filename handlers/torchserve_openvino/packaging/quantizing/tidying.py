"""Makes an exported graph one that NNCF 3.4 takes: it counts sizes among the inputs of an operator, and confuses them.

Views whose sizes depend on those of the input become operators that need none, and keyword arguments become positional.
Computations that nothing uses go.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchserve_openvino.ops.names import value_of

aten = torch.ops.aten
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}


def tidied(model: GraphModule) -> GraphModule:
    """Changes a graph in place, and returns it."""
    for node in list(model.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        _make_positional(node, node.target)
        if node.target in _VIEWS:
            _make_sizeless(node)
    model.graph.eliminate_dead_code()
    model.recompile()
    return model


def _make_positional(node: Node, operator: torch._ops.OpOverload) -> None:
    args, kwargs = list(node.args), dict(node.kwargs)
    names = [each.name for each in operator._schema.arguments if not each.kwarg_only]
    for position, argument in enumerate(operator._schema.arguments[: len(names)]):
        if position >= len(args) and not kwargs.keys().isdisjoint(names[position:]):
            args.append(kwargs.pop(argument.name, argument.default_value))
    node.args, node.kwargs = tuple(args), kwargs


def _make_sizeless(node: Node) -> None:
    """Turns a view that splits one axis, or joins adjacent ones, into one that says only this."""
    source = node.args[0]
    if not isinstance(source, Node) or not any(isinstance(size, Node) for size in node.args[1]):  # type: ignore[union-attr]
        return
    before, after = list(value_of(source).shape), list(value_of(node).shape)
    first = _common(before, after)
    if first == len(before) == len(after):
        node.replace_all_uses_with(source)
        return
    last = _common(before[first:][::-1], after[first:][::-1])
    if first and first + last in {len(before), len(after)}:
        # Only axes of size 1 come or go: together with the one before them.
        first -= 1
    split, joined = after[first : len(after) - last], before[first : len(before) - last]
    if len(joined) == 1 and sum(not isinstance(size, int) for size in split) <= 1:
        sizes = [size if isinstance(size, int) else -1 for size in split]
        node.target, node.args = aten.unflatten.int, (source, first, sizes)
    elif len(split) == 1 and joined:
        node.target, node.args = aten.flatten.using_ints, (source, first, first + len(joined) - 1)


def _common(a: list[Any], b: list[Any]) -> int:
    """Returns how many sizes at the beginning are the same."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if str(x) != str(y):
            break
        count += 1
    return count
