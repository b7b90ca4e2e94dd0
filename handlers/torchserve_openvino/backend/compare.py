"""Whether two answers of a model are the same, within what a precision allows."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

# Largest difference relative to the largest value of the output. float32: summation order over some thousand terms;
# bfloat16 keeps 8 bits of mantissa, float16 11: their rounding adds up over the layers of a network.
RELATIVE_TOLERANCE = {"f32": 1e-3, "f16": 2e-2, "bf16": 6e-2}
_OF_DTYPE = {torch.float16: RELATIVE_TOLERANCE["f16"], torch.bfloat16: RELATIVE_TOLERANCE["bf16"]}


def relative_tolerance(precision: str) -> float:
    """The tolerance for what a device infers with; the widest for a name that is not known."""
    return RELATIVE_TOLERANCE.get(precision, RELATIVE_TOLERANCE["bf16"])


def output_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of an answer of any structure, in order."""
    # A ModelOutput of transformers that torch's pytree does not know is a mapping all the same.
    plain = dict(output) if hasattr(output, "keys") else output
    return [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, torch.Tensor)]


def difference(got: Any, expected: Any, precision: str) -> str:
    """What is wrong with an answer, in words; empty where nothing is."""
    ours, theirs = output_tensors(got), output_tensors(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} outputs instead of {len(theirs)}"
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {index} is {list(a.shape)} {a.dtype} instead of {list(b.shape)} {b.dtype}"
        if not a.numel():
            continue
        wide = torch.complex128 if a.is_complex() else torch.float64
        x, y = a.to(wide), b.to(wide)
        scale = float(y.abs().nan_to_num(0.0, 0.0, 0.0).max())
        # A model may compute in a narrower type than the device is told to.
        limit = max(relative_tolerance(precision), _OF_DTYPE.get(a.dtype, 0.0)) * max(1.0, scale)
        if not torch.allclose(x, y, rtol=0.0, atol=limit, equal_nan=True):
            worst = float((x - y).abs().nan_to_num(float("inf")).max())
            return f"output {index} differs by {worst:.3g}, more than {limit:.3g}"
    return ""
