"""Runs the model on every compiled shape before READY, so that no request pays for compilation."""

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchserve_openvino.serving.input_spec import Inputs, Signature
from torchserve_openvino.serving.value_sets import ValueSet

logger = logging.getLogger(__name__)

# A worker that needs more than this share of startupTimeout may miss it on a busy day.
SAFE_SHARE = 0.7


@dataclass(frozen=True)
class Case:
    """One warm-up call.

    Attributes:
        inputs: Made-up values of one compiled shape, or a sample from the archive.
        compiled_shape: Whether this is the shape to compile, not to be split or padded.
        others: Makes other values of the same shape, which the call is verified on.
    """

    name: str
    inputs: Inputs
    compiled_shape: bool = True
    others: Callable[[], Sequence[ValueSet]] | None = None


def signatures(batch_sizes: Sequence[int], dims: Mapping[str, Sequence[int]], mode: str) -> list[Signature]:
    """The cross product of batch sizes and lengths.

    Args:
        batch_sizes: Compiled batch sizes.
        dims: Compiled lengths of each named dimension.
        mode: In ``dynamic`` one symbolic graph serves all lengths, except that torch treats 1 by itself: the least, one
            in the middle and the largest are run.
    """
    lengths = [
        sorted({1, max(1, sizes[-1] // 2), sizes[-1]}) if mode == "dynamic" else sizes for sizes in dims.values()
    ]
    return [
        Signature(batch, dict(zip(dims, combination, strict=True)))
        for batch in batch_sizes
        for combination in itertools.product(*lengths)
    ]


def warm_up(
    compiled: Callable[..., Any], served: Callable[..., Any], cases: Sequence[Case], *, rounds: int = 2
) -> tuple[float, float]:
    """Calls the model with each case; the second round shows what a request will take.

    Args:
        compiled: Takes the cases that have a compiled shape.
        served: Takes the others: pads and splits.

    Returns:
        Seconds for all of it, and for one further call of each case.
    """
    start = time.perf_counter()
    steady = 0.0
    for position, case in enumerate(cases, 1):
        args, kwargs = case.inputs
        model = compiled if case.compiled_shape else served
        for _ in range(rounds):
            call = time.perf_counter()
            with torch.inference_mode():
                model(*args, **kwargs)
            last = time.perf_counter() - call
        steady += last
        logger.info(
            "Warm-up %d of %d: %s, %.1f s so far, %.1f ms a call",
            position, len(cases), case.name, time.perf_counter() - start, last * 1e3,
        )  # fmt: skip
    return time.perf_counter() - start, steady


def startup_advice(seconds: float, timeout: int) -> str | None:
    """What to change where loading came near TorchServe's ``startupTimeout`` (s); None where there is time enough."""
    if seconds <= SAFE_SHARE * timeout:
        return None
    return (
        f"loading took {seconds:.0f} s of the {timeout} s that startupTimeout allows; a busier machine would miss it. "
        f"Set startupTimeout: {int(seconds * 2.5) + 30} or compile fewer shapes (handler.openvino.batching)"
    )
