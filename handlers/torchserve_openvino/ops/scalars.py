"""Operators on tensors without dimensions: OpenVINO fails on them, or crashes; with one dimension of 1 it is right."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten
Repair = Callable[..., Any]


def _lifted(op: Any, otherwise: Repair | None = None, shaped_by: int | None = None) -> Repair:
    """The operator on tensors of one element.

    Args:
        op: The overload.
        otherwise: Its repair for tensors that have dimensions.
        shaped_by: The argument whose shape the result has; without it a result has no dimensions either.
    """

    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim():
            return otherwise(x, *args, **kwargs) if otherwise is not None else NotImplemented
        shape = list(args[shaped_by - 1].shape) if shaped_by is not None else []
        lifted = pytree.tree_map_only(Tensor, lambda t: t.reshape([-1]), (x, *args))
        named = pytree.tree_map_only(Tensor, lambda t: t.reshape([-1]), kwargs)
        return pytree.tree_map_only(Tensor, lambda t: t.reshape(shape), op(*lifted, **named))

    return decomposed


def _expand(x: Tensor, size: list[int], *, implicit: bool = False) -> Tensor:
    return aten.alias.default(x) if not x.dim() and not size else NotImplemented


def _repeat(x: Tensor, repeats: list[int]) -> Tensor:
    return x.clone() if not x.dim() and not repeats else NotImplemented


def _squeeze(x: Tensor, dim: list[int]) -> Tensor:
    """OpenVINO squeezes all dimensions where none is named, and takes a named one of symbolic size for gone."""
    going = [d for d in dim if x.dim() and x.shape[d] == 1]
    if len(going) == len(dim) and dim:
        return NotImplemented
    return aten.squeeze.dims(x, going) if going else aten.alias.default(x)


def of_scalars(others: dict[Any, Repair]) -> dict[Any, Repair]:
    """Repairs for tensors without dimensions.

    Args:
        others: Repairs of the same operators for all other tensors.
    """
    found: dict[Any, Repair] = {aten.expand.default: _expand, aten.repeat.default: _repeat, aten.squeeze.dims: _squeeze}
    for op in (
        aten.index_select.default, aten.topk.default, aten.prod.dim_int, aten.sort.stable, aten.max.dim, aten.min.dim,
        aten.argmin.default, aten.argmax.default, aten.amax.default, aten.amin.default, aten.scatter_add.default,
        aten.scatter_reduce.two, aten.masked_scatter.default, aten.index_add.default, aten.index_fill.int_Scalar,
        aten.cumsum.default, aten.index_copy.default,
    ):  # fmt: skip
        found[op] = _lifted(op, others.get(op))
    found[aten.gather.default] = _lifted(aten.gather.default, others.get(aten.gather.default), shaped_by=2)
    return found
