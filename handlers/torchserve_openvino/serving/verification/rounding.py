"""Checks whether a difference from eager PyTorch is mere rounding, by running eager in another precision.

Where an input is constant, normalisation subtracts nearly equal numbers and divides the remainder by almost zero: the
answer then consists of rounding errors, eager's as much as OpenVINO's, and no tolerance fits it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.runtime.compare import output_tensors, widened
from torchserve_openvino.serving.shapes.input_spec import Inputs

logger = logging.getLogger(__name__)

# The dtype in which eager shows the rounding of a precision: a wider one for f32, the precision itself otherwise.
_OTHER = {"f32": torch.float64, "bf16x3": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
# How many times eager's rounding error the difference may be: both answers have errors, and different ones.
_FACTOR = 8.0
# Products in bf16x3 have 16 bits of mantissa, those of eager 24.
_COARSER = {"bf16x3": 2.0**8}


def is_rounding(
    eager: Callable[..., Any],
    inputs: Inputs,
    got: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    precision: str,
) -> bool:
    """Checks whether a difference is no larger than the effect of rounding on eager at the same values.

    NaN or infinity at another place, another shape or dtype are never rounding. The weights are copied temporarily.
    """
    other = _run_in(eager, inputs, precision)
    if other is None or not len(got) == len(expected) == len(other):
        return False
    factor = _FACTOR * _COARSER.get(precision, 1.0)
    return all(_within(a, b, c, factor) for a, b, c in zip(got, expected, other, strict=True))


def _within(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, factor: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or b.shape != c.shape:
        return False
    x, y, z = widened(a), widened(b), widened(c)
    if not torch.equal(x.isfinite(), y.isfinite()) or not torch.equal(
        x[~x.isfinite()].isnan(), y[~y.isfinite()].isnan()
    ):
        return False
    moved = (z - y)[y.isfinite() & z.isfinite()].abs()
    differs = (x - y)[y.isfinite()].abs()
    if not differs.numel():
        return True
    return bool(moved.numel()) and float(differs.max()) <= factor * float(moved.max())


def _run_in(eager: Callable[..., Any], inputs: Inputs, precision: str) -> list[torch.Tensor] | None:
    """Returns eager's answer in another precision; None where the model does not run in it."""
    kind = _OTHER.get(precision)
    if kind is None or not isinstance(eager, torch.nn.Module):
        return None

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(kind) if tensor.is_floating_point() else tensor

    weights = {name: cast(t.detach()) for name, t in (*eager.named_parameters(), *eager.named_buffers())}
    args, kwargs = pytree.tree_map_only(torch.Tensor, cast, inputs)
    try:
        with torch.inference_mode():
            return output_tensors(torch.func.functional_call(eager, weights, args, kwargs))
    except Exception as error:
        # A model may hard-code its dtypes, and then does not run in others.
        logger.info("Verification: eager does not run in %s: %s", kind, error)
        return None
