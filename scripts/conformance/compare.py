"""Compares a compiled answer with eager's: types, shapes, values and positions of NaN."""

import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

# Relative to each value, and to the largest value of the output: summation orders and roundings of transcendental
# functions differ. OpenVINO computes float16 in float32 and rounds once; torch rounds at each step.
TOLERANCE = {
    torch.float32: (2e-4, 2e-5),
    torch.complex64: (2e-4, 2e-5),
    torch.float16: (1e-2, 2e-3),
    torch.complex32: (1e-2, 2e-3),
    torch.bfloat16: (5e-2, 1e-2),
    torch.float64: (1e-7, 1e-9),
    torch.complex128: (1e-7, 1e-9),
}


def difference(got: Any, expected: Any, values: bool = True) -> str:
    """Describes the first difference; empty if there is none.

    Args:
        got: The compiled function's answer, of any structure.
        expected: Eager's answer.
        values: False compares types and shapes only (random numbers, uninitialized memory).
    """
    ours, theirs = pytree.tree_leaves(got), pytree.tree_leaves(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} outputs instead of {len(theirs)}"
    for a, b in zip(ours, theirs, strict=True):
        if problem := _leaf(a, b, values):
            return problem
    return ""


def _leaf(a: Any, b: Any, values: bool) -> str:
    if not isinstance(b, torch.Tensor) or not isinstance(a, torch.Tensor):
        if type(a) is not type(b):
            return f"{type(a).__name__} instead of {type(b).__name__}"
        same = a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))
        return "" if same or not values else f"{a!r} instead of {b!r}"
    if a.layout != b.layout:
        return f"{a.layout} instead of {b.layout}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}"
    if not values or not b.numel():
        return ""
    if b.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    a, b = a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg()
    if b.dtype not in TOLERANCE:
        wrong = a != b
        if b.dtype is torch.int64:
            # Casting inf or NaN to an integer is undefined: eager gives the int64 minimum, we may give the int32 one.
            wrong &= ~((b == torch.iinfo(torch.int64).min) & (a == torch.iinfo(torch.int32).min))
    else:
        relative, absolute = TOLERANCE[b.dtype]
        wide = torch.complex128 if b.is_complex() else torch.float64
        a, b = a.to(wide), b.to(wide)
        finite = b.abs()[b.isfinite()]
        scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
        wrong = ~torch.isclose(a, b, rtol=relative, atol=absolute * scale, equal_nan=True)
    if not wrong.any():
        return ""
    first = tuple(int(i) for i in wrong.nonzero()[0])
    difference = f"at {list(first)} {a[first].item()} instead of {b[first].item()}"
    return f"{int(wrong.sum())} of {wrong.numel()} values differ, {difference}"
