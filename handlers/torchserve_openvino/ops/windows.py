"""Windows over a dimension (`Tensor.unfold`), as a selection: OpenVINO's own conversion fails.

A view, so it is no decomposition: one that leaves the graph is made by torch, and shares memory as in eager.
"""

from typing import Any

import numpy as np
import torch
from openvino import Output
from openvino import opset15 as ops
from torch import Tensor
from torch.fx import Node

from torchserve_openvino.ops.names import value_of


def _window_order(rank: int, dimension: int) -> list[int]:
    """Where the dimensions go once the elements of a window stand behind the windows' own dimension."""
    return [*range(dimension + 1), *range(dimension + 2, rank + 1), dimension + 1]


def _unfold(x: Output, dimension: int, size: int, step: int) -> Any:
    """Windows along a dimension, whose elements go last.

    Args:
        x: Of static size in this dimension (`refuse_unfold`).
    """
    shape = x.get_partial_shape()
    dimension %= len(shape)
    starts = np.arange(0, shape[dimension].get_length() - size + 1, step, dtype=np.int64)
    places = ops.constant(starts[:, None] + np.arange(size, dtype=np.int64))
    windows = ops.gather(x, places, ops.constant(np.int64(dimension)))
    return ops.transpose(windows, ops.constant(np.array(_window_order(len(shape), dimension), dtype=np.int64)))


def unfold_by_selection(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """The same in operators of torch, for the way through TorchScript."""
    dimension %= x.dim()
    count = (int(x.shape[dimension]) - size) // step + 1
    places = (torch.arange(count).unsqueeze(-1) * step + torch.arange(size)).reshape(-1)
    windows = torch.index_select(x, dimension, places).unflatten(dimension, (count, size))
    return windows.permute(_window_order(x.dim(), dimension))


def refuse_unfold(node: Node) -> str | None:
    """Why a node cannot be converted, or None."""
    arguments: Any = node.args
    value, dimension = value_of(arguments[0]), arguments[1]
    if not value.dim():
        return "a scalar has one window"
    if not isinstance(value.shape[dimension], int):
        return "the number of windows depends on the call"
    return None


WINDOWS = {"aten.unfold.default": _unfold}
