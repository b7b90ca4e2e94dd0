"""Operators of several steps on float16 and bfloat16: torch rounds the result only, OpenVINO each step.

So are factors and divisors: torch multiplies with them in float32 and rounds the product, OpenVINO rounds them, too.
Summands are float16 in torch as well.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree

from torchserve_openvino.ops.rule_registry import Decomposition, Rule, declare, stays_whole
from torchserve_openvino.ops.rules.precision.narrow_integers import in_32_bits, product_in_bytes

aten = torch.ops.aten
_FLOAT16 = torch.finfo(torch.float16)
_NARROW = frozenset({torch.float16, torch.bfloat16})


def _in_float32(op: Any, otherwise: Decomposition = stays_whole) -> Decomposition:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        x = args[0]
        if x.dtype not in _NARROW or kwargs.get("dtype") not in {None, x.dtype}:
            return otherwise(*args, **kwargs)
        with disable_proxy_modes_tracing():
            results = op(*args, **kwargs)
        if "dtype" in kwargs:
            kwargs = {**kwargs, "dtype": torch.float32}
        wide = op(*pytree.tree_map_only(Tensor, _wide, args), **kwargs)
        return pytree.tree_map(lambda mine, its: mine.to(its.dtype), wide, results)

    return decomposed


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype in _NARROW else x


for _op in (
    aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction,
    aten.native_group_norm.default, aten._native_batch_norm_legit.no_stats, aten.native_batch_norm.default,
    aten._native_batch_norm_legit_functional.default, aten._batch_norm_with_update_functional.default,
    aten.cumprod.default, aten.logcumsumexp.default, aten.index_add.default,
):  # fmt: skip
    declare(Rule(decompose_narrow=_in_float32(_op)), _op)


def _beyond_float16(op: Any, eps: int) -> Decomposition:
    """Computes a norm in float32 only where float16 has neither its count nor its ``eps``: else it stays one kernel.

    Args:
        op: The operator.
        eps: The position of that argument.
    """
    wide = _in_float32(op)

    def decomposed(x: Tensor, *args: Any) -> Any:
        beyond = args[eps - 1] < _FLOAT16.tiny / 64 or not (isinstance(x.numel(), int) and x.numel() <= _FLOAT16.max)
        return wide(x, *args) if x.dtype is torch.float16 and beyond else stays_whole(x, *args)

    return decomposed


for _op, _eps in ((aten.native_layer_norm.default, 4), (aten._native_batch_norm_legit_no_training.default, 6)):
    declare(Rule(decompose_narrow=_beyond_float16(_op, _eps)), _op)
for _op in (aten.cumsum.default, aten.scatter_add.default):
    declare(Rule(decompose_narrow=_in_float32(_op, in_32_bits(_op, exceeds=True))), _op)


def _reduces(*args: Any, **kwargs: Any) -> bool:
    return args[4] not in {"amax", "amin"}


def _accumulates(*args: Any, **kwargs: Any) -> bool:
    return len(args) > 3 and bool(args[3])


def _where(applies: Callable[..., bool], narrow: Decomposition) -> Decomposition:
    return lambda *args, **kwargs: (narrow if applies(*args, **kwargs) else stays_whole)(*args, **kwargs)


# OpenVINO adds to the rounded sum, which stops to grow at 256 times the summand in bfloat16.
for _op, _applies in ((aten.scatter_reduce.two, _reduces), (aten.index_put.default, _accumulates)):
    declare(Rule(decompose_narrow=_where(_applies, _in_float32(_op))), _op)


def _with_number(op: Any, otherwise: Decomposition | None = None) -> Decomposition:
    """Computes in float32 where float16 does not hold an operand that is a number or a tensor of no dimension.

    Args:
        op: The operator.
        otherwise: What other calls become; they stay as they are, if None.
    """

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        if any(map(_may_exceed_float16, (*args, *kwargs.values()))):
            with disable_proxy_modes_tracing():
                kind = op(*args, **kwargs).dtype
            if kind is torch.float16:
                return op(*pytree.tree_map_only(Tensor, _wide, args), **kwargs).to(kind)
        return otherwise(*args, **kwargs) if otherwise is not None else NotImplemented

    return decomposed


def _may_exceed_float16(operand: Any) -> bool:
    if isinstance(operand, Tensor):
        return operand.ndim == 0 and operand.dtype is not torch.float16
    if isinstance(operand, (bool, complex)):
        return False
    if not isinstance(operand, (int, float)):
        # A size that is open.
        return isinstance(operand, (torch.SymInt, torch.SymFloat))
    return math.isfinite(operand) and operand != 0 and not _FLOAT16.tiny <= abs(operand) <= _FLOAT16.max


for _op in (aten.mul.Tensor, aten.mul.Scalar):
    declare(Rule(decompose_narrow=_with_number(_op, product_in_bytes(_op))), _op)
for _op in (aten.div.Tensor, aten.div.Scalar):
    declare(Rule(decompose_narrow=_with_number(_op)), _op)
