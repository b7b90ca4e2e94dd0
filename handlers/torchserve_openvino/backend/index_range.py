"""Which values an integer input may hold where it selects from a tensor.

PyTorch raises on an index beyond the end; OpenVINO's Gather answers zeros, and takes a negative index for one from the
end. An input that reaches an indexing operator unchanged therefore gets bounds, which each call checks. An index that
is computed inside the graph is not followed.
"""

import operator
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from torchserve_openvino.backend.spec import Bounds
from torchserve_openvino.ops.embedding_bag import includes_last
from torchserve_openvino.ops.movement import HANDS_ON
from torchserve_openvino.ops.names import op_name, packet_name, tensors_of, value_of

# Operator to the arguments (tensor selected from, dimension or None for the first, index), indices from 0 up.
_SELECTS: dict[str, tuple[int, int | None, int]] = {
    "aten.embedding": (0, None, 1),
    "aten.index_select": (0, 1, 2),
    "aten.gather": (0, 1, 2),
    "aten.scatter": (0, 1, 2),
    "aten.scatter_add": (0, 1, 2),
    "aten.scatter_reduce": (0, 1, 2),
    "aten.index_add": (0, 1, 2),
    "aten.index_copy": (0, 1, 2),
    "aten.index_fill": (0, 1, 2),
    "aten._embedding_bag": (0, None, 1),
    "aten._embedding_bag_forward_only": (0, None, 1),
}
# What 32 bits hold: the end is not known beforehand, and OpenVINO itself raises beyond it.
_ANY = 2**31 - 1
_BAGS = frozenset({"aten._embedding_bag", "aten._embedding_bag_forward_only"})
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def index_bounds(graph: GraphModule) -> dict[str, Bounds]:
    """Least and largest allowed value of each placeholder that is an index, by its name."""
    found = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        if any(tensor.dtype in _INTEGERS for tensor in tensors_of(value_of(node))):
            bounds = [bound for user, source in _reached(node) for bound in _bounds(user, source)]
            if bounds:
                first, last = (
                    next((e for e in ends if e is not None), None)
                    for ends in zip(*(b[3:] for b in bounds), strict=True)
                )
                low, high = max(each.low for each in bounds), min(each.high for each in bounds)
                found[node.name] = Bounds(low, high, first=first, last=last)
    return found


def _reached(start: Node) -> list[tuple[Node, Node]]:
    """Users of a value and of whatever only hands it on: (user, the node that it takes it from)."""
    found: list[tuple[Node, Node]] = []
    seen, waiting = {start}, [start]
    while waiting:
        source = waiting.pop()
        for user in source.users:
            found.append((user, source))
            if user.op == "call_function" and user not in seen and _hands_on(user):
                seen.add(user)
                waiting.append(user)
    return found


def _hands_on(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    integer = all(tensor.dtype in _INTEGERS for tensor in tensors_of(value_of(node)))
    return integer and packet_name(op_name(node.target)) in HANDS_ON


def _bounds(node: Node, index: Node) -> list[Bounds]:
    if node.op != "call_function" or node.target is operator.getitem:
        return []
    name = packet_name(op_name(node.target))
    if name in {"aten.index", "aten.index_put", "aten._unsafe_index"}:
        indices = node.args[1] if len(node.args) > 1 else ()
        places = [i for i, arg in enumerate(indices) if arg is index] if isinstance(indices, (list, tuple)) else []
        sizes = [_size(node.args[0], place) for place in places]
        return [Bounds(-size, size - 1) for size in sizes if size is not None]
    if name in _BAGS and node.args[2] is index:
        # Where bags start: the first at the first element, none behind the last.
        length = _size(node.args[1], 0)
        most = _ANY if length is None else length
        return [Bounds(0, most, first=0, last=length if includes_last(node) else None)]
    if name not in _SELECTS:
        return []
    source, dim, place = _SELECTS[name]
    if len(node.args) <= place or node.args[place] is not index:
        return []
    along = node.args[dim] if dim is not None else 0
    size = _size(node.args[source], along) if isinstance(along, int) else None
    return [Bounds(0, size - 1)] if size is not None else []


def _size(arg: object, dim: int) -> int | None:
    """A dimension's size; None where it is symbolic."""
    if not isinstance(arg, Node):
        return None
    shape: Sequence[object] = next((t.shape for t in tensors_of(value_of(arg))), ())
    size = shape[dim] if -len(shape) <= dim < len(shape) else None
    return size if isinstance(size, int) else None
