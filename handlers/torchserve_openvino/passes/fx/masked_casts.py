"""Keeps from a cast to an integer the floats whose results a choice behind it drops.

T5's and MPNet's buckets of distances take the logarithm of 0 for the distance 0, cast it to an integer, which holds no
such value, and then choose the distance itself. The check of the cast (`checks.py`) would fail at each call. For any
elementwise ``f``, ``where(c, a, f(cast(x)))`` is ``where(c, a, f(cast(where(c, 0, x))))``. What depends on no input is
computed in torch instead (`folding.py`).
"""

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from torchserve_openvino.ops.names import value_of
from torchserve_openvino.ops.symbolic_sizes import is_always_true
from torchserve_openvino.passes.fx.int_range import is_cast_from_float
from torchserve_openvino.passes.fx.nodes import add_call
from torchserve_openvino.passes.pass_context import PassContext

aten = torch.ops.aten
_ELEMENTWISE = frozenset({
    aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.mul.Tensor, aten.neg.default, aten.abs.default,
    aten.minimum.default, aten.maximum.default, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default,
    aten._to_copy.default,
})  # fmt: skip
# These read a tensor's shape, not its values.
_READ_SHAPES = frozenset({
    aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.sym_size.int,
})  # fmt: skip


def mask_casts(graph: Graph, _: PassContext) -> None:
    """Gives 0 to the casts from floats where a choice drops what follows from them.

    Args:
        graph: A partition's graph; changed in place.
        _: Not needed.
    """
    for choice in graph.find_nodes(op="call_function", target=aten.where.self):
        condition, *sides = choice.args
        if sides[0] is sides[1]:
            continue
        for side in (1, 2):
            # All of them first: a cast's input changes below.
            for cast in list(_casts(choice.args[side], choice)):
                if not _goes_before(condition, cast):
                    continue
                (x,) = cast.all_input_nodes
                with graph.inserting_before(cast):
                    zero = add_call(graph, aten.new_zeros.default, x, [])
                    operands = (x, zero) if side == 1 else (zero, x)
                    cast.replace_input_with(x, add_call(graph, aten.where.self, condition, *operands))


def _goes_before(condition: Node, cast: Node) -> bool:
    """Moves what a condition is computed from in front of a cast; returns False if the cast is part of it."""
    nodes = list(cast.graph.nodes)
    late = nodes[nodes.index(cast) : nodes.index(condition) + 1]
    # Backwards, so that a node comes after all that use it.
    needed = {condition}
    for node in reversed(late):
        if node in needed:
            needed.update(node.all_input_nodes)
    if cast in needed:
        return False
    for node in late:
        if node in needed:
            cast.prepend(node)
    return True


def _casts(node: object, user: Node) -> Iterator[Node]:
    """Yields the casts from floats that nothing but a choice uses, through elementwise operators of its shape.

    Args:
        node: What the choice, or an operator in front of it, takes.
        user: That operator.
    """
    if not isinstance(node, Node) or node.op != "call_function":
        return
    if not _same_shape(value_of(node), value_of(user)):
        return
    if any(other is not user and other.target not in _READ_SHAPES for other in node.users):
        return
    if is_cast_from_float(node):
        yield node
    elif node.target in _ELEMENTWISE:
        for source in node.all_input_nodes:
            yield from _casts(source, node)


def _same_shape(value: object, other: object) -> bool:
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor) or value.dim() != other.dim():
        return False
    return all(is_always_true(a == b) for a, b in zip(value.shape, other.shape, strict=True))
