"""Matrix products, and distances between rows."""

import math

import torch
from torch import Tensor

from torchserve_openvino.ops.names import packets
from torchserve_openvino.ops.registry import FAILS, INSTEAD, Rule, declare, decomposition
from torchserve_openvino.ops.rules.ordering import MOST_COMPARISONS

aten = torch.ops.aten
Number = int | float | bool
# A pairwise distance is decomposed row by row.
_MOST_ROWS = 64

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
