"""Operators whose CPU kernel answers in contiguous memory, or channels last, whatever the layout of what comes in.

What they are decomposed into, and the shape functions of those that stay whole, go by the strides of the input.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _of_plain_memory(op: Any) -> Callable[..., Any]:
    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        for memory_format in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d):
            if x.is_contiguous(memory_format=memory_format):
                return NotImplemented
        return op(x.contiguous(), *args, **kwargs)

    return decomposed


LAYOUTS = {
    op: _of_plain_memory(op)
    for op in (
        aten._native_batch_norm_legit_no_training.default,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten.native_batch_norm.default,
        aten.log_sigmoid_forward.default,
    )
}
