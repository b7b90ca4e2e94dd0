"""Whether eager PyTorch itself, in another precision, moves as far as a compiled answer differs from it.

Where an input is constant, normalisation subtracts nearly equal numbers and divides what is left by nearly nothing:
the answer is then made of rounding errors, eager's as much as OpenVINO's, and no tolerance fits it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.runtime.compare import output_tensors, widened
from torchserve_openvino.serving.shapes.input_spec import Inputs

logger = logging.getLogger(__name__)

# What shows the rounding of a precision: the answer without it, or with it.
_OTHER = {"f32": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
# Both answers err, each in its own way: how many times eager's error the difference may be.
_FACTOR = 8.0


def is_rounding(
    eager: Callable[..., Any],
    inputs: Inputs,
    got: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    precision: str,
) -> bool:
    """Whether a difference is no larger than what rounding does to eager at the very same values.

    NaN or infinity at another place, another shape or type are never rounding. Weights are copied for the time of it.
    """
    other = _run_in(eager, inputs, precision)
    if other is None or not len(got) == len(expected) == len(other):
        return False
    return all(map(_within, got, expected, other))


def _within(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> bool:
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
    return bool(moved.numel()) and float(differs.max()) <= _FACTOR * float(moved.max())


def _run_in(eager: Callable[..., Any], inputs: Inputs, precision: str) -> list[torch.Tensor] | None:
    """Eager's answer in another precision; None where the model does not run in it."""
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
        # A model may name its types itself, and then does not take others.
        logger.info("Verification: eager does not run in %s: %s", kind, error)
        return None
