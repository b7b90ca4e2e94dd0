"""Matrix products, and distances between rows."""

import math
from typing import Any

import numpy as np
import torch
from openvino import Output
from openvino import opset15 as ops
from torch import Tensor
from torch.fx import Node

from torchserve_openvino.ops.names import arguments_of, first_input, packets, value_of
from torchserve_openvino.ops.openvino_values import int64
from torchserve_openvino.ops.rule_registry import FAILS, INSTEAD, Rule, conversion, declare, decomposition
from torchserve_openvino.ops.rules.ordering import MOST_COMPARISONS
from torchserve_openvino.ops.rules.shapes import on_cpu
from torchserve_openvino.ops.symbolic_sizes import is_always_true

aten = torch.ops.aten
Number = int | float | bool
# A pairwise distance is decomposed row by row.
_MOST_ROWS = 64
# With 64 experts, a step of decoding takes as long as with their products in eager PyTorch; with 128, 10 times as long.
_MOST_EXPERTS = 64

declare(Rule(multiplies=True), *packets("mm bmm addmm baddbmm dot mv matmul convolution"))
declare(Rule(verified=True), aten.dot.default, aten.linear.default)
declare(Rule(banned=FAILS + INSTEAD), aten.linalg_cross.default)


@decomposition(aten.addmm.default, aten.baddbmm.default)
def _add_product(x: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Leaves the summand out if beta is 0: torch ignores it then, and it may be uninitialized memory."""
    if beta != 0 or not x.is_floating_point():
        return NotImplemented
    # A factor is scaled, not the product, which might exceed float16.
    return torch.matmul(left if alpha == 1 else left * alpha, right)


@decomposition(aten.addbmm.default)
def _addbmm(x: Tensor, left: Tensor, right: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """Computes a single product, with all batches side by side."""
    if not x.is_floating_point():
        return NotImplemented
    batch, rows, inner = left.shape
    wide = left.transpose(0, 1).reshape(rows, batch * inner)
    return torch.addmm(x, wide, right.reshape(batch * inner, right.shape[2]), beta=beta, alpha=alpha)


def _distance(difference: Tensor, p: float) -> Tensor:
    """Computes the p-norm over the last dimension."""
    size = difference.abs()
    if p == 0:
        return (size != 0).to(size.dtype).sum(-1)
    if p == 1:
        return size.sum(-1)
    if p == 2:
        return (size * size).sum(-1).sqrt()
    if p == math.inf:
        return size.amax(-1)
    return size.pow(p).sum(-1).pow(1 / p)


@decomposition(
    aten._cdist_forward.default, rule=Rule(banned="OpenVINO takes every norm for the Euclidean one" + INSTEAD)
)
def _cdist(x: Tensor, y: Tensor, p: float, compute_mode: int | None) -> Tensor:
    """Computes distances from differences, or Euclidean ones of many rows from a matrix product, as torch does."""
    rows = (x.shape[-2], y.shape[-2])
    if p == 2 and (compute_mode == 1 or (compute_mode in {None, 0} and max(rows) > 25)):
        x_square, y_square = (x * x).sum(-1, keepdim=True), (y * y).sum(-1, keepdim=True)
        left = torch.cat([-2 * x, x_square, torch.ones_like(x_square)], -1)
        right = torch.cat([y, torch.ones_like(y_square), y_square], -1)
        return (left @ right.transpose(-2, -1)).clamp_min(0).sqrt()
    if math.prod(rows) * math.prod(x.shape[:-2]) * x.shape[-1] > MOST_COMPARISONS:
        return NotImplemented
    return _distance(x.unsqueeze(-2) - y.unsqueeze(-3), p)


@decomposition(aten._pdist_forward.default)
def _pdist(x: Tensor, p: float = 2) -> Tensor:
    if x.shape[0] > _MOST_ROWS:
        return NotImplemented
    if x.shape[0] < 2:
        return x.new_zeros([0])
    pairs = [_distance(x[i] - x[i + 1 :], p) for i in range(x.shape[0] - 1)]
    return torch.cat(pairs)


# --- mixtures of experts ------------------------------------------------------------------------------------------


# Enough for any two float32: the smallest has 149 bits behind the point.
_HALVINGS = 300


def _no_bins(node: Node) -> str | None:
    arguments, value = arguments_of(node), first_input(node)
    least, largest = arguments.get("min", 0), arguments.get("max", 0)
    if not (isinstance(least, (int, float)) and isinstance(largest, (int, float)) and least < largest):
        return "the bounds of the bins are those of the values"
    if value is not None and is_always_true(value.numel() * arguments.get("bins", 100) > MOST_COMPARISONS):
        return "too many values and bins to compare each with each"
    return "computed in float32 only" if value is not None and value.dtype is not torch.float32 else None


def _bounds_of_bins(least: float, largest: float, bins: int) -> np.ndarray:
    """Returns the smallest float32 of each bin, and of the one behind the last; found by bisection."""
    low, high, count = np.float32(least), np.float32(largest), np.float32(bins)
    below, above = np.full(bins + 1, low), np.full(bins + 1, high)
    for _ in range(_HALVINGS):
        middle = ((below.astype(np.float64) + above) / 2).astype(np.float32)
        reached = np.floor((middle - low) * count / (high - low)) >= np.arange(bins + 1)
        below, above = np.where(reached, below, middle), np.where(reached, middle, above)
    above[0] = low
    return above


@conversion(aten.histc.default, rule=Rule(limit=_no_bins))
def _histc(x: Output, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Counts by comparing the bin of each value with each bin; the last one includes its upper bound.

    transformers counts the rows of each expert with it. Formula: torch's aten/src/ATen/native/cpu/HistogramKernel.cpp,
    where values near a bound are in the bin that float32 computes.
    """
    bounds = _bounds_of_bins(min, max, bins)
    values = ops.reshape(x, int64([-1, 1]), False)
    below = ops.less(values, ops.constant(bounds[1:]))
    last = ops.logical_and(ops.less_equal(values, np.float32(max)), ops.constant(np.arange(bins) == bins - 1))
    chosen = ops.logical_and(ops.greater_equal(values, ops.constant(bounds[:-1])), ops.logical_or(below, last))
    return ops.reduce_sum(ops.convert(chosen, "f32"), int64([0]), False)


def _other_groups(node: Node) -> str | None:
    arguments, rows = arguments_of(node), first_input(node)
    weight = value_of(node.args[1]) if len(node.args) > 1 and isinstance(node.args[1], Node) else None
    if rows is None or weight is None:
        return "groups without known shapes"
    plain = rows.dim() == 2 and weight.dim() == 3 and isinstance(weight.shape[0], int)
    if not plain or arguments.get("bias") is not None:
        return "groups of other operands than rows of one matrix"
    if weight.shape[0] > _MOST_EXPERTS:
        return f"more than {_MOST_EXPERTS} experts: the product of each costs a call of its own, with rows or without"
    return "a result of another type" if arguments.get("out_dtype") not in {None, rows.dtype} else None


@conversion("transformers.grouped_mm_fallback.default", aten._grouped_mm.default, rule=Rule(limit=_other_groups))
def _grouped_mm(x: Output, weight: Output, offs: Output) -> Any:
    """Multiplies the rows of each expert with its matrix; they lie one after another.

    Args:
        x: ``[S, K]``, sorted by expert.
        weight: ``[E, K, N]``.
        offs: ``[E]``: where the rows of each expert end. Rows after the last are 0.
    """
    count = weight.get_partial_shape()[0].get_length()
    rows, columns = (ops.gather(ops.shape_of(x, "i64"), int64([0]), int64(0)),
                     ops.gather(ops.shape_of(weight, "i64"), int64([2]), int64(0)))  # fmt: skip
    ends = ops.split(ops.convert(offs, "i64"), int64(0), count)
    begin, parts = int64([0]), []
    for expert in range(count):
        end = ends.output(expert)
        own = ops.slice(x, begin, end, int64([1]), int64([0]))
        parts.append(ops.matmul(own, ops.gather(weight, int64(expert), int64(0)), False, False).output(0))
        begin = end
    zero = ops.convert(ops.constant(np.float32(0.0)), x.get_element_type())
    parts.append(ops.broadcast(zero, ops.concat([ops.subtract(rows, begin), columns], 0)).output(0))
    return ops.reshape(ops.concat(parts, 0), ops.concat([rows, columns], 0), False)


@decomposition(aten.eye.default, aten.eye.m)
def _eye(n: int, m: int | None = None, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Counts in int64: torch's decomposition counts in uint16 from 256 on, for which its `arange` has no kernel."""
    if on_cpu(options):
        return NotImplemented
    rows, columns = torch.arange(n), torch.arange(n if m is None else m)
    return (rows.unsqueeze(-1) == columns).to(dtype or torch.get_default_dtype())


@decomposition(aten._trilinear.default)
def _trilinear(
    x: Tensor, weight: Tensor, y: Tensor, expand1: list[int], expand2: list[int], expand3: list[int],
    sumdim: list[int], unroll_dim: int = 1,
) -> Tensor:  # fmt: skip
    """Makes two products of matrices of `nn.Bilinear`: a sum of products of all three operands takes their memory."""
    count = x.dim() + len(expand1)
    letters = "abcdefgh"[:count]
    terms = (
        "".join(letter for i, letter in enumerate(letters) if i not in gaps) for gaps in (expand1, expand2, expand3)
    )
    left = "".join(letter for i, letter in enumerate(letters) if i not in sumdim)
    return torch.einsum(f"{','.join(terms)}->{left}", x, weight, y)
