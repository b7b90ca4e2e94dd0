"""Look-ups and writes at an index, a mask or positions.

Each call checks the values of indices (`passes.fx.index_range`, `passes.fx.checks`).
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from openvino import Output, Type
from openvino import opset15 as ops
from torch import Tensor
from torch.fx import Node

from torchserve_openvino.ops import integers
from torchserve_openvino.ops.names import arguments_of, first_input, is_empty, value_of
from torchserve_openvino.ops.opaque_ops import BATCHED_NMS
from torchserve_openvino.ops.openvino_values import int64, rank
from torchserve_openvino.ops.rule_registry import (
    FAILS,
    INSTEAD,
    SHAPE,
    Index,
    Lifted,
    Movement,
    Rule,
    TracedCall,
    conversion,
    declare,
    decomposition,
)
from torchserve_openvino.ops.symbolic_sizes import is_always_true

aten = torch.ops.aten
Number = int | float | bool

# Maps torch's names of reductions to OpenVINO's.
_REDUCTIONS = {"sum": "sum", "prod": "prod", "mean": "mean", "amax": "max", "amin": "min"}
_ALONG = Index(source=0, dim=1, index=2)

declare(Rule(movement=Movement.LOOKS_UP, index=Index(0, None, 1, stays_inside=True)), aten.embedding)
declare(Rule(movement=Movement.LOOKS_UP, integers=integers.first), aten.index)
declare(
    Rule(movement=Movement.LOOKS_UP, integers=integers.first, index=Index(0, 1, 2, stays_inside=True)),
    aten.index_select,
)
declare(Rule(scalars=Lifted()), aten.index_select.default, aten.index_copy.default)
declare(Rule(index=_ALONG), aten.scatter, aten.index_copy, aten.index_fill, aten.index_reduce)
declare(Rule(index=_ALONG, integers=integers.plus_all_of(3)), aten.scatter_add, aten.scatter_reduce, aten.index_add)
declare(Rule(integers=integers.put), aten.index_put)
declare(Rule(traced=TracedCall("index", aten.index.Tensor)), aten._unsafe_index.Tensor)
declare(
    Rule(banned=SHAPE),
    aten.nonzero.default, aten.repeat_interleave.self_Tensor, BATCHED_NMS, "torchvision.nms.default",
)  # fmt: skip


# --- look-ups -----------------------------------------------------------------------------------------------------


def _other_index_shape(node: Node) -> str | None:
    """Returns why an index does not fit its tensor, or None; a decomposition equalizes known sizes beforehand."""
    source, index = node.args[0], node.args[2]
    if not (isinstance(source, Node) and isinstance(index, Node) and isinstance(node.args[1], int)):
        return None
    shape, target_shape = value_of(source).shape, value_of(index).shape
    dim = node.args[1] % max(len(shape), 1)
    if any(
        d != dim and str(size) != str(other) for d, (size, other) in enumerate(zip(shape, target_shape, strict=False))
    ):
        return "an index of other sizes than the tensor, which are known only at run time"
    return None


declare(Rule(movement=Movement.LOOKS_UP, integers=integers.first, index=_ALONG), aten.gather)


@decomposition(aten.gather.default, rule=Rule(limit=_other_index_shape, scalars=Lifted(shaped_by=2)))
def _gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """Cuts the tensor to the sizes of the index, which OpenVINO requires except along ``dim``.

    It does so by look-ups, since OpenVINO drops a slice before a gather.
    """
    dim = dim % max(x.dim(), 1)
    sizes = [(d, size, index.shape[d]) for d, size in enumerate(x.shape) if d != dim]
    larger = [(d, target) for d, size, target in sizes if type(size) is type(target) is int and size != target]
    if not larger:
        return NotImplemented
    for d, target in larger:
        x = torch.index_select(x, d, torch.arange(target))
    return torch.gather(x, dim, index)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Makes the index contiguous, as the kernel's result is; decomposed to `index`, eager's result is laid out like it.

    Fake tensors do not show this: for them, the result of `index` is contiguous.
    """
    return NotImplemented if index.is_contiguous() else aten.take.default(x, index.contiguous())


declare(Rule(decompose_strided=_take), aten.take.default)


# --- writes -------------------------------------------------------------------------------------------------------


def _not_by_mask(node: Node) -> str | None:
    """Returns why an assignment by index is not converted, or None.

    Through a mask: shapes in OpenVINO must not depend on its values. A sum of int64: it may exceed 32 bits.
    """
    arguments = arguments_of(node)
    indices, values, accumulates = arguments["indices"], arguments["values"], arguments.get("accumulate", False)
    assert isinstance(indices, (list, tuple)) and isinstance(values, Node)
    if accumulates and value_of(node).dtype in {torch.int64, torch.bool}:
        return "a sum of int64 may exceed 32 bits, in which OpenVINO computes it; one of booleans counts"
    kinds = {value_of(i).dtype for i in indices if isinstance(i, Node)}
    if torch.uint8 in kinds:
        return "indices in uint8, which torch takes for a mask"
    if torch.bool not in kinds:
        return None
    if len(indices) == 1 and is_always_true(value_of(values).numel() == 1) and not accumulates:
        return None
    return "assigns several values through a mask: how many depends on the mask's values"


@conversion(aten.index_put.default, rule=Rule(limit=_not_by_mask))
def _index_put(x: Output, indices: Sequence[Output | None], values: Output, accumulate: bool = False) -> Any:
    """Writes ``values`` to ``x`` at ``indices``, by NumPy's advanced indexing, or at a mask (`_not_by_mask`)."""
    if indices[0] is not None and indices[0].get_element_type() == Type.boolean:
        mask = indices[0]
        missing = rank(x) - rank(mask)
        if missing:
            mask = ops.unsqueeze(mask, int64(range(-missing, 0))).output(0)
        return ops.select(mask, ops.reshape(values, int64([1] * rank(x)), False), x)
    axes = range(rank(x))
    sizes = ops.shape_of(x, "i64")

    def some(dims: Sequence[int]) -> Any:
        """Returns the sizes of some dimensions, which may be known only at run time."""
        return ops.gather(sizes, ops.constant(np.array(dims, dtype=np.int64)), ops.constant(np.int64(0)))

    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    others = [dim for dim in axes if dim not in indexed]
    # Negative indices count from the end.
    positions = []
    for dim in indexed:
        wide = ops.convert(indices[dim], "i64")
        is_negative = ops.less(wide, ops.constant(np.int64(0)))
        positions.append(ops.select(is_negative, ops.add(wide, ops.squeeze(some([dim]), int64(0))), wide))
    # Indices of several dimensions are broadcast together.
    joined = functools.reduce(ops.add, positions)
    together = ops.shape_of(joined, "i64")
    columns = [ops.unsqueeze(ops.broadcast(position, together), int64([-1])) for position in positions]
    # The indexed dimensions go first, as ScatterNDUpdate requires.
    order = indexed + others
    moved = ops.transpose(x, int64(order))
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    before = indexed[0] if adjacent else 0
    # torch puts the broadcast dimensions in place of the indexed ones if these are adjacent, else first.
    target = ops.concat([some(others[:before]), together, some(others[before:])], 0)
    wide_values = ops.broadcast(values, target)
    count = rank(joined.output(0))
    length = len(others) + count
    first = [*range(before, before + count), *range(before), *range(before + count, length)]
    updates = ops.transpose(wide_values, int64(first)) if length else wide_values
    scattered = ops.scatter_nd_update(
        moved, ops.concat(columns, -1), updates, reduction="sum" if accumulate else "none"
    )
    return ops.transpose(scattered, int64([order.index(dim) for dim in axes]))


def _scatter_sum(node: Node) -> str | None:
    source = first_input(node)
    if source is not None and source.dim() == 0:
        return "scatter_add to a scalar fails in OpenVINO"
    if source is not None and source.dtype in {torch.int64, torch.bool}:
        return "a sum of int64 may exceed 32 bits, in which OpenVINO computes it; one of booleans counts"
    return None


declare(Rule(verified=True, limit=_scatter_sum, scalars=Lifted()), aten.scatter_add.default)


def _scatter_reduction(node: Node) -> str | None:
    reduction = node.args[4] if len(node.args) > 4 else node.kwargs.get("reduce")
    if reduction in {"amax", "amin"}:
        return None
    source = first_input(node)
    if source is not None and not source.is_floating_point():
        if reduction == "mean":
            return "the mean of integers: torch rounds it down, OpenVINO towards 0"
        if reduction == "prod":
            return "a product of integers may exceed 2^24, up to which OpenVINO is exact"
    return _scatter_sum(node)


@conversion(aten.scatter_reduce.two, rule=Rule(limit=_scatter_reduction, scalars=Lifted()))
def _scatter_reduce(x: Output, dim: int, index: Output, src: Output, reduce: str, *, include_self: bool = True) -> Any:
    """Reduces elements of ``src`` into ``x`` at ``index`` along ``dim``."""
    part = index.get_partial_shape()
    if not part.is_static or part != src.get_partial_shape():
        # The index may be smaller than ``src``.
        count = part.rank.get_length()
        src = ops.slice(src, int64([0] * count), ops.shape_of(index, "i64"), int64([1] * count)).output(0)
    axis = ops.constant(np.int64(dim))

    def scatter(target: Output, source: Output) -> Output:
        return ops.scatter_elements_update(
            target, index, source, axis, reduction=_REDUCTIONS[reduce], use_init_val=include_self
        ).output(0)

    result = scatter(x, src)
    if reduce not in {"amax", "amin"} or not x.get_element_type().is_real():
        return result
    # torch propagates NaN, OpenVINO drops it. A flag marks NaN: 1 for the maximum, -1 for the minimum, else 0.
    sign = 1.0 if reduce == "amax" else -1.0
    flags = [ops.multiply(ops.convert(ops.is_nan(operand), "f32"), np.float32(sign)).output(0) for operand in (x, src)]
    is_nan = ops.not_equal(scatter(*flags), np.float32(0.0))
    return ops.select(is_nan, ops.constant(np.nan, dtype=x.get_element_type()), result)


@decomposition(aten.masked_scatter.default, rule=Rule(verified=True, scalars=Lifted()))
def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Broadcasts the tensor that is written to, which OpenVINO does not."""
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    if shape == x.shape:
        return NotImplemented
    return torch.masked_scatter(x.expand(shape).clone(), mask.expand(shape), source)


@decomposition(
    aten.index_fill.int_Scalar, aten.index_fill.int_Tensor,
    rule=Rule(banned=FAILS + " for float16 and scalars" + INSTEAD, scalars=Lifted()),
)  # fmt: skip
def _index_fill(x: Tensor, dim: int, index: Tensor, value: Number | Tensor) -> Tensor:
    # A write to no element is made a copy later (`passes/fx/empty_tensors.py`).
    if not x.dim() or is_empty(index):
        return NotImplemented
    size = x.shape[dim]
    # The look-up counts negative indices from the end, and keeps the check that none is out of range.
    places = torch.arange(size)[index.reshape(-1)]
    chosen = torch.zeros(size).scatter(0, places, torch.ones(places.shape)) != 0
    shape = [1] * x.dim()
    shape[dim] = size
    filling = value.to(x.dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype)
    return torch.where(chosen.reshape(shape), filling, x)


@decomposition(aten.index_add.default, rule=Rule(banned=FAILS + INSTEAD, scalars=Lifted()))
def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Number = 1) -> Tensor:
    if not x.dim() or not x.is_floating_point():
        return NotImplemented
    scaled = source if alpha == 1 else source * alpha
    return torch.scatter_add(x, dim, _along(dim, index, source), scaled)


@decomposition(aten.index_reduce.default, rule=Rule(banned="OpenVINO has none" + INSTEAD))
def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    if not x.dim() or not x.is_floating_point():
        return NotImplemented
    return torch.scatter_reduce(x, dim, _along(dim, index, source), source, reduce, include_self=include_self)


def _along(dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Repeats an index of rows for each of their elements."""
    shape = [1] * source.dim()
    shape[dim] = -1
    return index.to(torch.int64).reshape(shape).expand(source.shape)
