"""Estimates what a line of a program costs, without computing it: the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# Of one core: products of matrices, and elements of anything else. Sorting and scans take more for each element.
_FLOPS_PER_SECOND = 3e10
_ELEMENTS_PER_SECOND = 4e8
_SLOW = {"sort": 30, "topk": 10, "median": 20, "kthvalue": 20, "unique": 40, "cum": 3, "logcumsumexp": 10, "pool": 6,
         "grid_sampler": 20, "bicubic": 20, "lstm": 30, "gru": 30, "scatter": 4, "index_put": 10}  # fmt: skip


class _Count(TorchDispatchMode):
    """Adds up the estimated seconds of the operators that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        read = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if func.is_view:
            return result
        if func.overloadpacket in flop_registry and tensors:
            flops = flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
            self.seconds += flops / _FLOPS_PER_SECOND
        elif "scaled_dot_product" in name:
            query, key = args[0], args[1]
            self.seconds += 4 * query.numel() * key.shape[-2] / _FLOPS_PER_SECOND
        slow = max((factor for word, factor in _SLOW.items() if word in name), default=1)
        elements = sum(t.numel() for t in tensors) + sum(t.numel() for t in read if slow > 1 or len(read) == 1)
        self.seconds += slow * elements / _ELEMENTS_PER_SECOND
        return result


def seconds_of(run: Callable[[], Any]) -> float | None:
    """Estimated seconds of a computation on torch's meta device; None if it needs values or is refused."""
    count = _Count()
    try:
        with torch.device("meta"), torch.no_grad(), count:
            run()
    except Exception:
        # The caller runs it in eager, which says which.
        return None
    return count.seconds


def cost_of(code: str, env: dict[str, Any], tensors: dict[str, torch.Tensor]) -> float:
    """Estimated seconds of a line.

    Args:
        code: The line.
        env: The names that it uses; modules are on torch's meta device, which computes shapes only.
        tensors: The values that it reads.
    """
    blank = {
        name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for name, t in tensors.items()
    }
    seconds = seconds_of(lambda: exec(code, {**env, **blank}))
    return 10 * sum(map(torch.numel, tensors.values())) / _ELEMENTS_PER_SECOND if seconds is None else seconds


def parameters_of(module: Any) -> int:
    """The number of elements of a module's parameters, or of a parameter."""
    if isinstance(module, torch.nn.Module):
        return sum(math.prod(parameter.shape) for parameter in module.parameters())
    return module.numel() if isinstance(module, torch.Tensor) else 0
