"""The order of a tensor's dimensions in memory, and decompositions that keep that of eager PyTorch.

A decomposition computes the same values as its operator, but may lay them out differently: torch's own give `exp2` the
order of a power, and `interpolate` that of an index. The order shows in the strides of results, and later operators
depend on it: whether `reshape` copies, for example.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from torchserve_openvino.ops.names import tensors_of
from torchserve_openvino.ops.rule_registry import Decomposition

_UNKNOWN_BEFORE_THE_RUN = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def layout_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the order of dimensions in memory, or None if it is the contiguous one.

    Gaps between elements, as in a slice, are ignored: later operators depend on the order.
    """
    if tensor.dim() < 2:
        return None
    strides, sizes = example_strides(tensor)
    several = [i for i, size in enumerate(sizes) if size != 1]
    by_stride = sorted(several, key=lambda i: (-strides[i], i))
    # Elements that share memory, as in an expanded value, have no order.
    shared = 0 in [strides[i] for i in several]
    if by_stride == several or shared or any(strides[a] < strides[b] * sizes[b] for a, b in pairwise(by_stride)):
        return None
    places = iter(by_stride)
    return tuple(i if size == 1 else next(places) for i, size in enumerate(sizes))


def example_strides(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns strides and sizes as numbers, chosen so that no symbolic size is 1, which would hide an order."""
    for factor in (1, 2, 4, 8):
        strides, sizes = (tuple(example_of(v, factor) for v in values) for values in (tensor.stride(), tensor.shape))
        if all(size > 1 or isinstance(traced, int) for size, traced in zip(sizes, tensor.shape, strict=True)):
            break
    return strides, sizes


def example_of(value: Any, factor: int = 1) -> int:
    """Returns a size or stride as a number; a symbol counts as its example value, but at least 2, times ``factor``."""
    if isinstance(value, int):
        return value
    known, symbols = value.node.shape_env.backed_var_to_val, value.node.expr.free_symbols
    return int(value.node.expr.subs({name: factor * max(2, int(known.get(name, 2))) for name in symbols}))


def in_order(tensor: Tensor, layout: tuple[int, ...] | None) -> Tensor:
    """Returns a tensor in a given memory order (`layout_of`): itself, or a copy."""
    return tensor if layout_of(tensor) == layout else relaid(tensor, layout)


def relaid(tensor: Tensor, layout: tuple[int, ...] | None) -> Tensor:
    """Copies a tensor to another memory order; None is the contiguous one."""
    if layout is None:
        return tensor.contiguous()
    inverse = sorted(range(len(layout)), key=layout.__getitem__)
    return tensor.permute(layout).contiguous().permute(inverse)


def laid_out_copy(tensor: Tensor, layout: tuple[int, ...] | None) -> Any:
    """Copies a tensor as `relaid` does, to a tensor that is not a view.

    Autograd refuses to write in place to a view that was made while gradients were off, or inside a compiled function.
    """
    return without_base(relaid(tensor, layout))


def without_base(value: Any) -> Any:
    """Returns a tensor with the same memory that autograd does not see as a view; other values as they are."""
    if not isinstance(value, Tensor) or value._base is None:
        return value
    storage, offset = value.untyped_storage(), value.storage_offset()
    return torch.empty(0, dtype=value.dtype).set_(storage, offset, value.shape, value.stride())


def laid_out_as_whole(
    op: torch._ops.OpOverload, decompose: Decomposition, ordered_as: Callable[..., Any] | None = None
) -> Decomposition:
    """Wraps a decomposition so that its results have the memory order of the operator itself.

    Args:
        op: Called on fake tensors, outside the trace. Where this fails, the decomposition's order stays.
        decompose: The decomposition.
        ordered_as: Called instead of ``op`` (`Rule`).
    """
    if not _UNKNOWN_BEFORE_THE_RUN.isdisjoint(op.tags):
        return decompose

    def laid_out(*args: Any, **kwargs: Any) -> Any:
        results = decompose(*args, **kwargs)
        if results is NotImplemented or not any(_has_order(tensor) for tensor in tensors_of(results)):
            return results
        try:
            with disable_proxy_modes_tracing():
                whole = _whole(op, ordered_as, args, kwargs)
        except (RuntimeError, TypeError):
            # No kernel for fake tensors, or none for these arguments.
            return results
        if isinstance(results, Tensor):
            return _as(results, whole)
        parts = [_as(mine, its) for mine, its in zip(results, whole, strict=True)]
        return parts if isinstance(results, list) else tuple(parts)

    return laid_out


def _whole(op: Any, ordered_as: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
    """Returns fake tensors in the memory order of eager's results."""
    operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if ordered_as is None and torch.Tag.pointwise in op.tags and len(operands) == 2:
        # On fake tensors, many of these run as Python kernels that misplace broadcast dimensions (tests/contract).
        return torch.ops.aten.mul.Tensor(*operands)
    return (ordered_as or op)(*args, **kwargs)


def _has_order(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.layout is torch.strided


def _as(result: Any, whole: Any) -> Any:
    return in_order(result, layout_of(whole)) if _has_order(result) and _has_order(whole) else result
