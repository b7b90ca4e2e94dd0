"""Views, copies, casts and new tensors: operators that move data."""

import math
import operator
from typing import Any

import numpy as np
import torch
from openvino import Output
from openvino import opset15 as ops
from torch import Tensor
from torch.fx import Node

from torchserve_openvino.ops import integers, value_range
from torchserve_openvino.ops.names import first_input, op_name, packets, value_of
from torchserve_openvino.ops.openvino_values import int64, rank, static_shape
from torchserve_openvino.ops.rule_registry import (
    INSTEAD,
    Movement,
    Rule,
    TracedCall,
    conversion,
    declare,
    decomposition,
    rule_of,
)
from torchserve_openvino.ops.symbolic_sizes import is_always_true

aten = torch.ops.aten
_WIDE_INTEGERS = frozenset({torch.int16, torch.int32, torch.int64})
_NARROW_FLOATS = frozenset({torch.float16, torch.bfloat16})

declare(
    Rule(movement=Movement.REARRANGES, integers=integers.largest_tensor),
    *packets("""
        _to_copy _unsafe_view alias as_strided cat chunk clone contiguous detach expand expand_copy flatten flip
        lift_fresh_copy narrow permute permute_copy repeat reshape roll split split_with_sizes squeeze squeeze_copy
        stack t transpose unbind unfold unsqueeze unsqueeze_copy view view_copy
    """),
)
declare(Rule(movement=Movement.REARRANGES, integers=integers.first), *packets("select slice"))
declare(
    Rule(movement=Movement.FILLS),
    *packets("copy full full_like new_full new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like"),
)
declare(Rule(range=value_range.arange), aten.arange)
declare(Rule(range=value_range.of_argument(1), integers=integers.of_argument(1)), aten.full, aten.full_like)
declare(Rule(integers=integers.of_argument(2)), aten.new_full)
declare(Rule(range=value_range.of_argument(0)), aten.scalar_tensor)
declare(Rule(range=value_range.stated(0), integers=integers.at_most(0)), aten.zeros, aten.zeros_like)
declare(Rule(range=value_range.stated(1), integers=integers.at_most(1)), aten.ones, aten.ones_like)
declare(Rule(integers=integers.at_most(1)), aten.new_zeros, aten.new_ones)
declare(Rule(movement=Movement.SELECTS), aten.constant_pad_nd)
declare(Rule(movement=Movement.SELECTS), aten.slice_scatter, aten.select_scatter)
declare(Rule(integers=integers.largest_tensor), aten.slice_scatter, aten.select_scatter, aten.slice_copy)
declare(Rule(verified=True), aten.linspace.default, aten.repeat_interleave.self_int)
# An alias in its place would still be a view of its source, and autograd would give it the gradient that detach has to
# stop.
declare(Rule(never_decomposed=True), aten.detach)
declare(Rule(banned="OpenVINO returns uninitialized memory for a multiple of 4" + INSTEAD), aten.rot90.default)


def _sliced(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


declare(Rule(traced=TracedCall("view", Tensor.view, sized=True)), aten.view.default)
declare(Rule(traced=TracedCall("reshape", Tensor.reshape, sized=True)), aten._unsafe_view.default, aten.reshape.default)
declare(Rule(traced=TracedCall("expand", Tensor.expand, sized=True)), aten.expand.default)
declare(Rule(traced=TracedCall("slice", _sliced, sized=True)), aten.slice.Tensor)
declare(Rule(traced=TracedCall("size", Tensor.size, sized=True)), aten.sym_size.int)


# --- casts and copies ---------------------------------------------------------------------------------------------


def _loses(source: torch.dtype, target: torch.dtype) -> bool:
    """Checks whether a cast between two floats may change values: neither of bfloat16 and float16 holds the other."""
    floats = source.is_floating_point and target.is_floating_point
    return floats and source is not target and target.itemsize <= source.itemsize


def _rounds(node: Node) -> str | None:
    """Refuses a cast to a narrower float and on to another: OpenVINO computes in float32, and drops the rounding."""
    source, value = first_input(node), value_of(node)
    if source is None or not isinstance(value, torch.Tensor) or not _loses(source.dtype, value.dtype):
        return None
    seen, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user.op != "call_function" or user in seen:
                continue
            name, result = op_name(user.target), value_of(user)
            floats = isinstance(result, torch.Tensor) and result.dtype.is_floating_point
            if name == "aten._to_copy.default" and floats and result.dtype is not value.dtype:
                return f"a cast to {value.dtype} and back: OpenVINO drops the rounding between them"
            if rule_of(name).movement is Movement.REARRANGES or user.target is operator.getitem:
                seen.add(user)
                waiting.append(user)
    return None


def _rounded(x: Tensor) -> Tensor:
    """Rounds float32 to the 8 significant bits of bfloat16, so that the cast has nothing left to cut off.

    Veltkamp's splitting: T. J. Dekker, "A floating-point technique for extending the available precision", 1971.
    """
    wide = x * 65537.0
    return wide - (wide - x)


def _traced_to_copy(x: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return x.to(dtype or x.dtype, copy=True)


@decomposition(aten._to_copy.default, rule=Rule(limit=_rounds, traced=TracedCall("to", _traced_to_copy)))
def _to_copy(x: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **rest: Any) -> Tensor:
    """Corrects two casts: OpenVINO takes a scalar NaN for False, and truncates where torch rounds to a narrow float."""
    if device not in {None, x.device}:
        return NotImplemented
    if dtype is torch.bool and x.is_floating_point():
        mask = x.ne(0)
    elif dtype in _NARROW_FLOATS and x.dtype in _WIDE_INTEGERS:
        # By way of float32, as torch: https://github.com/pytorch/pytorch/blob/main/c10/util/Half.h
        mask = _rounded(x.to(torch.float32)).to(dtype) if dtype is torch.bfloat16 else x.to(torch.float32).to(dtype)
    else:
        return NotImplemented
    layout = rest.get("memory_format") or torch.preserve_format
    return mask if layout is torch.preserve_format else mask.contiguous(memory_format=layout)


def _traced_copy(x: Any, source: Any, _non_blocking: bool = False) -> Any:
    """Traces the functional copy: the source in the shape and dtype of the tensor that it overwrites."""
    return source.to(x.dtype).expand_as(x)


@decomposition(aten.copy.default, rule=Rule(traced=TracedCall("copy", _traced_copy)))
def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Casts by an operator of its own, whose values are checked; OpenVINO's compilation of a copied scalar crashes."""
    if source.dtype is not x.dtype:
        cast = source.to(x.dtype)
        return cast if not (x.dim() or source.dim()) else aten.copy.default(x, cast)
    return source.clone() if not (x.dim() or source.dim()) else NotImplemented


# --- views --------------------------------------------------------------------------------------------------------


def _restrided(node: Node) -> str | None:
    """Returns why as_strided is refused, or None: OpenVINO sees a tensor's elements, not the memory around them."""
    source = first_input(node)
    if source is None:
        return None
    whole = source.is_contiguous() and source.storage_offset() == 0
    if whole and source.untyped_storage().nbytes() == source.numel() * source.element_size():
        return None
    return "as_strided reads memory that is not part of its input"


declare(Rule(limit=_restrided), aten.as_strided.default, aten.as_strided_copy.default)


def _scalar_to_scalar(node: Node) -> str | None:
    value, source = node.meta.get("val"), first_input(node)
    if value is not None and source is not None and value.dim() == 0 and source.dim() == 0:
        return "a scalar expanded to a scalar: OpenVINO 2026.4 crashes on it"
    return None


@decomposition(aten.expand.default, rule=Rule(limit=_scalar_to_scalar))
def _expand(x: Tensor, size: list[int], *, implicit: bool = False) -> Tensor:
    return aten.alias.default(x) if not x.dim() and not size else NotImplemented


@decomposition(aten.repeat.default, rule=Rule(limit=_scalar_to_scalar))
def _repeat(x: Tensor, repeats: list[int]) -> Tensor:
    return x.clone() if not x.dim() and not repeats else NotImplemented


@decomposition(aten.squeeze.dims)
def _squeeze(x: Tensor, dim: list[int]) -> Tensor:
    """Names dimensions of size 1 only: OpenVINO removes symbolic ones as well, and all if none is given."""
    going = [d for d in dim if x.dim() and x.shape[d] == 1]
    if len(going) == len(dim) and dim:
        return NotImplemented
    return aten.squeeze.dims(x, going) if going else aten.alias.default(x)


@conversion(aten.diagonal.default)
def _diagonal(x: Output, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Looks up the diagonal in both dimensions as one. (Not a decomposition: torch's own is a view, and stays one.)"""
    shape = static_shape(x)
    dim1, dim2 = dim1 % len(shape), dim2 % len(shape)
    columns = shape[dim2]
    length = min(shape[dim1] + min(offset, 0), columns - max(offset, 0))
    order = [dim for dim in range(len(shape)) if dim not in {dim1, dim2}]
    wide = [*(shape[dim] for dim in order), shape[dim1] * columns]
    flat = ops.reshape(ops.transpose(x, int64([*order, dim1, dim2])), int64(wide), False)
    start = -min(offset, 0) * columns + max(offset, 0)
    return ops.gather(flat, int64([start + i * (columns + 1) for i in range(length)]), int64([-1]))


# Elements of windows that are copied in any case, and copies of each element.
_MOST_IN_WINDOWS, _MOST_COPIES = 2**24, 16


# `Tensor.unfold` is a view, so it is not decomposed: where it leaves the graph, torch makes the view, which shares
# memory as in eager.
def _window_order(rank: int, dimension: int) -> list[int]:
    """Returns the order of dimensions that moves the elements of a window, now after the windows' own, to the end."""
    return [*range(dimension + 1), *range(dimension + 2, rank + 1), dimension + 1]


def _traced_unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Computes the same as `_unfold` with torch operators, for TorchScript."""
    dimension %= x.dim()
    count = (int(x.shape[dimension]) - size) // step + 1
    places = (torch.arange(count).unsqueeze(-1) * step + torch.arange(size)).reshape(-1)
    windows = torch.index_select(x, dimension, places).unflatten(dimension, (count, size))
    return windows.permute(_window_order(x.dim(), dimension))


def _other_windows(node: Node) -> str | None:
    """Returns why windows cannot be converted, or None."""
    arguments: Any = node.args
    value, dimension = value_of(arguments[0]), arguments[1]
    if not value.dim():
        return "a scalar has one window"
    if not isinstance(value.shape[dimension], int):
        return "the number of windows depends on the call"
    count = value_of(node).numel()
    if is_always_true(count > _MOST_IN_WINDOWS) and is_always_true(count > _MOST_COPIES * value.numel()):
        return "torch's windows share their elements, OpenVINO's would be too many copies"
    return None


@conversion(aten.unfold.default, rule=Rule(limit=_other_windows, traced=TracedCall("index_select", _traced_unfold)))
def _unfold(x: Output, dimension: int, size: int, step: int) -> Any:
    """Builds the windows along a dimension; their elements go to the last dimension.

    Args:
        x: Of static size in this dimension (`_other_windows`).
    """
    shape = x.get_partial_shape()
    dimension %= len(shape)
    starts = np.arange(0, shape[dimension].get_length() - size + 1, step, dtype=np.int64)
    places = ops.constant(starts[:, None] + np.arange(size, dtype=np.int64))
    windows = ops.gather(x, places, ops.constant(np.int64(dimension)))
    return ops.transpose(windows, ops.constant(np.array(_window_order(len(shape), dimension), dtype=np.int64)))


# --- writes to slices ---------------------------------------------------------------------------------------------
#
# OpenVINO's frontend merges nested ones into one operation, and looks up the position of each element that it writes.


def _size_along(x: Any, dim: int) -> Any:
    return ops.gather(ops.shape_of(x, "i64"), int64([dim]), int64(0))


@conversion(aten.slice_scatter.default)
def _slice_scatter(x: Output, src: Output, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    """Joins what lies before the slice, the new values, and what lies behind it.

    Args:
        start: An integer, or an output of one if it is symbolic; as ``step``.
        end: Not needed: ``src`` has the sizes of the slice.
    """
    dim %= rank(x)
    axis = int64([dim])
    count = _size_along(src, dim)
    first = start if isinstance(start, Output) else int64([start or 0])
    # The slice of OpenVINO counts from the end and stays inside, as torch's does.
    before = ops.slice(x, int64([0]), ops.reshape(first, int64([1]), False), int64([1]), axis)
    begin = _size_along(before, dim)
    if isinstance(step, Output) or step != 1:
        by = ops.reshape(step, int64([1]), False) if isinstance(step, Output) else int64([step])
        stop = ops.add(begin, ops.multiply(count, by))
        scalars = [ops.squeeze(bound, int64([0])) for bound in (begin, stop, by)]
        return ops.scatter_update(x, ops.range(*scalars, "i64"), src, axis)
    behind = ops.slice(x, ops.add(begin, count), int64([2**63 - 1]), int64([1]), axis)
    parts = [before.output(0), src, behind.output(0)]
    return ops.concat([part for part in parts if part.get_partial_shape()[dim] != 0], dim)


@conversion(aten.select_scatter.default)
def _select_scatter(x: Output, src: Output, dim: int, index: Any) -> Any:
    """Writes one row; an integer index may be negative, as in torch."""
    axis = int64([dim % rank(x)])
    wide = ops.unsqueeze(src, axis)
    row = ops.reshape(index if isinstance(index, Output) else int64([index]), int64([1]), False)
    from_start = ops.select(ops.less(row, int64([0])), ops.add(row, _size_along(x, dim % rank(x))), row)
    return ops.scatter_update(x, from_start, wide, axis)


# --- new tensors --------------------------------------------------------------------------------------------------


def _empty(size: list[int], order: list[int], options: dict[str, Any]) -> Tensor:
    """Returns zeros in place of uninitialized memory.

    Args:
        size: The shape.
        order: Dimensions from the outermost in memory to the innermost.
        options: The other keyword arguments of the operator.
    """
    if any(options.get(name) for name in ("device", "pin_memory", "layout")):
        return NotImplemented
    zeros = torch.zeros([size[dim] for dim in order], dtype=options.get("dtype"))
    return zeros.permute([order.index(dim) for dim in range(len(size))])


@decomposition(aten.empty_strided.default)
def _empty_strided(size: list[int], stride: list[int], **options: Any) -> Tensor:
    order = sorted(range(len(size)), key=lambda dim: -stride[dim])
    dense = [math.prod(size[dim] for dim in order[i + 1 :]) for i in range(len(order))]
    if [stride[dim] for dim in order] != dense:
        return NotImplemented
    return _empty(list(size), order, on_cpu(options))


@decomposition(aten.empty_permuted.default)
def _empty_permuted(size: list[int], physical_layout: list[int], **options: Any) -> Tensor:
    return _empty(list(size), list(physical_layout), on_cpu(options))


def on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    """Removes options that only state the default."""
    defaults = {"device": torch.device("cpu"), "layout": torch.strided, "pin_memory": False}
    return {name: value for name, value in options.items() if value is not None and defaults.get(name) != value}
