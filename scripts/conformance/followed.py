"""Arithmetic after an operator: OpenVINO fuses it into the operator's kernel where it can, sometimes wrongly."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

Function = Callable[..., Any]


def _along(value: torch.Tensor, dim: int) -> torch.Tensor:
    """A different number for each position along a dimension; built in the graph, where it becomes a constant."""
    numbers = torch.arange(1, value.shape[dim] + 1, dtype=value.dtype)
    shape = [1] * value.dim()
    shape[dim] = value.shape[dim]
    return numbers.reshape(shape)


# One per output: OpenVINO does not fuse a result that has two users.
TAILS: tuple[Function, ...] = (
    lambda value: value / 3,
    lambda value: value * _along(value, value.dim() - 1),
    lambda value: value - _along(value, 0),
    lambda value: value * _along(value, min(1, value.dim() - 1)) + 2,
)


def followed(function: Function) -> Function:
    """The operator followed by arithmetic on each numeric output; the output's shape decides which."""

    def follow(value: Any) -> Any:
        numbers = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dtype is not torch.bool
        if not numbers or not value.dim() or value.is_complex():
            return value
        return TAILS[(sum(value.shape) + value.dim()) % len(TAILS)](value)

    def run(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(follow, function(*args, **kwargs))

    return run
