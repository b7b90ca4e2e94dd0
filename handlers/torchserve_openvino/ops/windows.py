"""Windows over a dimension (`Tensor.unfold`), as a selection: OpenVINO's conversion fails."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows along a dimension, whose elements go last."""
    if not x.dim() or not isinstance(x.shape[dimension], int):
        return NotImplemented
    dimension %= x.dim()
    count = (x.shape[dimension] - size) // step + 1
    places = torch.arange(count, dtype=torch.int64).unsqueeze(-1) * step + torch.arange(size, dtype=torch.int64)
    rest = [d for d in range(x.dim()) if d != dimension]
    windows = torch.index_select(x.permute([*rest, dimension]), -1, places.reshape(-1))
    windows = windows.reshape([*(x.shape[d] for d in rest), count, size])
    order = [*range(dimension), len(rest), *range(dimension, len(rest)), len(rest) + 1]
    return windows.permute(order)


WINDOWS: dict[Any, Callable[..., Any]] = {torch.ops.aten.unfold.default: _unfold}
