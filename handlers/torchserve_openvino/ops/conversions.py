"""Operators that OpenVINO's frontend has no rule for, built of its operations: mappings of this package's own.

They take the schema's arguments as a user's mapping does (`register_op`), and are proven like OpenVINO's own
conversions, by tests/unit/ops and over torch's op_db. Shapes must be static; an error here leaves the operator in
eager PyTorch, counted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from openvino import Output, Type
from openvino import opset15 as ops
from torch.fx import Node

from torchserve_openvino.ops.detection import DETECTION
from torchserve_openvino.ops.division import refuse_own_quotient, refuse_quotient, rounds_right
from torchserve_openvino.ops.embedding_bag import EMBEDDING_BAG, bag_facts, refuse_bag
from torchserve_openvino.ops.exact_fmod import exact_fmod
from torchserve_openvino.ops.fourier import FOURIER, fourier_facts
from torchserve_openvino.ops.names import value_of
from torchserve_openvino.ops.recurrent import RECURRENT, refuse_recurrent
from torchserve_openvino.ops.windows import WINDOWS, refuse_unfold

# torch's name of a reduction to OpenVINO's.
_REDUCTIONS = {"sum": "sum", "prod": "prod", "mean": "mean", "amax": "max", "amin": "min"}


def _shape(tensor: Output) -> list[int]:
    return list(tensor.get_shape())


def _integers(values: Sequence[int]) -> Any:
    return ops.constant(np.array(values, dtype=np.int64))


def _index_put(x: Output, indices: Sequence[Output | None], values: Output, accumulate: bool = False) -> Any:
    """``x`` with ``values`` at ``indices``, NumPy's advanced indexing; a mask as `refuse_put` allows it."""
    shape = _shape(x)
    if indices[0] is not None and indices[0].get_element_type() == Type.boolean:
        mask = indices[0]
        for _ in shape[len(_shape(mask)) :]:
            mask = ops.unsqueeze(mask, _integers([-1])).output(0)
        return ops.select(mask, ops.reshape(values, _integers([1] * len(shape)), False), x)
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    kept = [dim for dim in range(len(shape)) if dim not in indexed]
    # Indices of several dimensions are broadcast together, and negative ones count from the end.
    given = [index for index in indices if index is not None]
    together = list(np.broadcast_shapes(*(_shape(index) for index in given)))
    columns = []
    for dim, index in zip(indexed, given, strict=True):
        wide = ops.convert(index, "i64")
        size = ops.constant(np.int64(shape[dim]))
        positive = ops.select(ops.less(wide, ops.constant(np.int64(0))), ops.add(wide, size), wide)
        columns.append(ops.unsqueeze(ops.broadcast(positive, _integers(together)), _integers([-1])))
    # The indexed dimensions go first, as ScatterNDUpdate wants them.
    order = indexed + kept
    moved = ops.transpose(x, _integers(order))
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    before = indexed[0] if adjacent else 0
    # Where torch puts the broadcast dimensions: in the place of the indexed ones if these are neighbours, else first.
    rest = [shape[dim] for dim in kept]
    target = [*rest[:before], *together, *rest[before:]]
    wide_values = ops.broadcast(values, _integers(target))
    count = len(together)
    first = [*range(before, before + count), *range(before), *range(before + count, len(target))]
    updates = ops.transpose(wide_values, _integers(first)) if target else wide_values
    scattered = ops.scatter_nd_update(
        moved, ops.concat(columns, -1), updates, reduction="sum" if accumulate else "none"
    )
    return ops.transpose(scattered, _integers([order.index(dim) for dim in range(len(shape))]))


def _scatter_reduce(x: Output, dim: int, index: Output, src: Output, reduce: str, *, include_self: bool = True) -> Any:
    """``x`` reduced with elements of ``src`` at ``index`` along ``dim``."""
    part = _shape(index)
    if part != _shape(src):
        # The index may be smaller than what it takes from.
        src = ops.slice(src, _integers([0] * len(part)), _integers(part), _integers([1] * len(part))).output(0)
    axis = ops.constant(np.int64(dim))

    def scatter(target: Output, source: Output) -> Output:
        return ops.scatter_elements_update(
            target, index, source, axis, reduction=_REDUCTIONS[reduce], use_init_val=include_self
        ).output(0)

    result = scatter(x, src)
    if reduce not in {"amax", "amin"} or not x.get_element_type().is_real():
        return result
    # torch hands NaN on, OpenVINO's maximum drops it; minus one is the least of the two flags.
    sign = 1.0 if reduce == "amax" else -1.0
    flags = [ops.multiply(ops.convert(ops.is_nan(each), "f32"), np.float32(sign)).output(0) for each in (x, src)]
    is_nan = ops.not_equal(scatter(*flags), np.float32(0.0))
    return ops.select(is_nan, ops.constant(np.nan, dtype=x.get_element_type()), result)


def _replication_pad(x: Output, padding: Sequence[int]) -> Any:
    """The edge repeated; ``padding`` starts with the last dimension, begin and end in turn."""
    rank = len(_shape(x))
    begin, end = [0] * rank, [0] * rank
    for i in range(len(padding) // 2):
        begin[rank - 1 - i], end[rank - 1 - i] = padding[2 * i], padding[2 * i + 1]
    return ops.pad(x, _integers(begin), _integers(end), "edge")


def _fmod(x: Output, y: Output | float) -> Any:
    """The remainder with the sign of ``x``; OpenVINO's own where that is exact."""
    kind = x.get_element_type()
    right = not kind.is_real() or (not isinstance(y, Output) and rounds_right(0.0, y))
    divisor = y if isinstance(y, Output) else ops.constant(y, dtype=kind).output(0)
    return ops.mod(x, divisor) if right else exact_fmod(x, divisor)


def _diagonal(x: Output, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """A look-up in the two dimensions made one. (Not a decomposition: torch's own is a view, and stays one.)"""
    shape = _shape(x)
    dim1, dim2 = dim1 % len(shape), dim2 % len(shape)
    columns = shape[dim2]
    length = min(shape[dim1] + min(offset, 0), columns - max(offset, 0))
    order = [dim for dim in range(len(shape)) if dim not in {dim1, dim2}]
    wide = [*(shape[dim] for dim in order), shape[dim1] * columns]
    flat = ops.reshape(ops.transpose(x, _integers([*order, dim1, dim2])), _integers(wide), False)
    start = -min(offset, 0) * columns + max(offset, 0)
    return ops.gather(flat, _integers([start + i * (columns + 1) for i in range(length)]), _integers([-1]))


def refuse_put(node: Node) -> str | None:
    """The reason against an assignment by index.

    Through a mask: OpenVINO's shapes must not depend on its values. A sum of int64: it may exceed 32 bits.
    """
    _, indices, values, *accumulate = (*node.args, *node.kwargs.values())
    assert isinstance(indices, (list, tuple)) and isinstance(values, Node)
    if any(accumulate) and value_of(node).dtype in {torch.int64, torch.bool}:
        return "a sum of int64 may exceed 32 bits, in which OpenVINO computes it; one of booleans counts"
    masks = [i for i in indices if isinstance(i, Node) and value_of(i).dtype in {torch.bool, torch.uint8}]
    if not masks:
        return None
    if len(indices) == 1 and value_of(values).numel() == 1 and not any(accumulate):
        return None
    return "assigns several values through a mask: how many depends on the mask's values"


CONVERSIONS: dict[str, Callable[..., Any]] = {
    "aten.diagonal.default": _diagonal,
    "aten.index_put.default": _index_put,
    "aten.fmod.Scalar": _fmod,
    "aten.fmod.Tensor": _fmod,
    "aten.scatter_reduce.two": _scatter_reduce,
    "aten.replication_pad1d.default": _replication_pad,
    "aten.replication_pad2d.default": _replication_pad,
    "aten.replication_pad3d.default": _replication_pad,
    **RECURRENT,
    **EMBEDDING_BAG,
    **FOURIER,
    **DETECTION,
    **WINDOWS,
}
# As `argument_rules.ARGUMENT_RULES`, for the operators above.
CONVERSION_RULES: dict[str, Callable[[Node], str | None]] = {
    "aten.index_put.default": refuse_put,
    "aten.fmod.Scalar": refuse_quotient,
    "aten.fmod.Tensor": refuse_quotient,
    **dict.fromkeys(RECURRENT, refuse_recurrent),
    **dict.fromkeys(EMBEDDING_BAG, refuse_bag),
    **dict.fromkeys(WINDOWS, refuse_unfold),
}
# The same, and for what is made of them, where OpenVINO's frontend has rules of its own, as through TorchScript.
FOREIGN_RULES: dict[str, Callable[[Node], str | None]] = {
    "aten.div.Tensor_mode": refuse_own_quotient,
    "aten.fmod.Scalar": refuse_own_quotient,
    "aten.fmod.Tensor": refuse_own_quotient,
    "aten.remainder.Scalar": refuse_own_quotient,
    "aten.remainder.Tensor": refuse_own_quotient,
}
# Keyword arguments for a conversion beside the operator's own: what the graph around it says.
CONVERSION_FACTS: dict[str, Callable[[Node], dict[str, Any]]] = {
    **dict.fromkeys(EMBEDDING_BAG, bag_facts),
    **dict.fromkeys(FOURIER, fourier_facts),
}
