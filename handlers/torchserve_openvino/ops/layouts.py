"""Operators whose CPU kernel answers in contiguous memory, or channels last, whatever the layout of what comes in.

What they are decomposed into, and the shape functions of those that stay whole, go by the strides of the input.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Decomposition = Callable[..., Any]


def _of_plain_memory(op: Any) -> Decomposition:
    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        for memory_format in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d):
            if x.is_contiguous(memory_format=memory_format):
                return NotImplemented
        return op(x.contiguous(), *args, **kwargs)

    return decomposed


def _of_contiguous(op: Any, *positions: int) -> Decomposition:
    """With the tensors by which an answer would be laid out; an `index` does so in eager PyTorch alone."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        if all(args[position].is_contiguous() for position in positions):
            return NotImplemented
        plain = [arg.contiguous() if position in positions else arg for position, arg in enumerate(args)]
        return op(*plain, **kwargs)

    return decomposed


_NORMS = (
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._batch_norm_with_update_functional.default,
    aten.native_batch_norm.default,
)
LAYOUTS: dict[Any, Decomposition] = {
    **{op: _of_plain_memory(op) for op in (*_NORMS, aten.log_sigmoid_forward.default)},
    aten.nll_loss2d_forward.default: _of_contiguous(aten.nll_loss2d_forward.default, 0, 1),
    aten.take.default: _of_contiguous(aten.take.default, 1),
}
