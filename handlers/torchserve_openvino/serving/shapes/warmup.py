"""Runs the model on every compiled shape before READY, so that no request pays for compilation."""

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.report.progress import begin_step
from torchserve_openvino.serving.modes import SERVING, Modes
from torchserve_openvino.serving.shapes.input_spec import Inputs, Signature
from torchserve_openvino.serving.shapes.value_sets import ValueSet

logger = logging.getLogger(__name__)

# A worker that needs more than this share of startupTimeout may miss it on a busy machine.
SAFE_SHARE = 0.7
# Calls of each case: the first compiles.
ROUNDS = 2


@dataclass(frozen=True)
class Case:
    """One warm-up call.

    Attributes:
        inputs: Generated values of one compiled shape, or a sample from the archive.
        compiled_shape: Whether the inputs have a compiled shape and need no splitting or padding.
        others: Generates other values of the same shape, to verify the call on.
        modes: The modes in which the handler calls the model.
    """

    name: str
    inputs: Inputs
    compiled_shape: bool = True
    others: Callable[[], Sequence[ValueSet]] | None = None
    modes: Modes = SERVING

    def to_plain(self) -> list[Any]:
        """Returns what the call's time and graphs depend on, JSON-safe: name, inputs without their values, modes."""
        leaves = [
            [str(leaf.dtype), list(leaf.shape)] if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            for leaf in pytree.tree_leaves(self.inputs)
        ]
        return [self.name, leaves, self.compiled_shape, self.modes.grad, str(self.modes.autocast)]


def signatures(
    batch_sizes: Sequence[int], dims: Mapping[str, Sequence[int]], mode: str, shortest: Mapping[str, int] | None = None
) -> list[Signature]:
    """Returns the cross product of batch sizes and lengths.

    Args:
        batch_sizes: Compiled batch sizes.
        dims: Compiled lengths of each named dimension.
        mode: The batching mode. In ``dynamic`` one symbolic graph serves all lengths, except that torch specializes
            for 1: only 1, a length in the middle and the largest are run.
        shortest: In ``dynamic``, the least length of each dimension that the model takes, where that is not 1.
    """
    lengths = [_some(sizes, (shortest or {}).get(name, 1)) if mode == "dynamic" else sizes
               for name, sizes in dims.items()]  # fmt: skip
    return [
        Signature(batch, dict(zip(dims, combination, strict=True)))
        for batch in batch_sizes
        for combination in itertools.product(*lengths)
    ]


def _some(sizes: Sequence[int], shortest: int) -> list[int]:
    return sorted({shortest, max(shortest, sizes[-1] // 2), sizes[-1]})


def run_case(compiled: Callable[..., Any], served: Callable[..., Any], case: Case) -> float:
    """Calls the model once, and returns the seconds that it took.

    Args:
        compiled: Called for a case that has a compiled shape.
        served: Called for any other; pads and splits.
    """
    args, kwargs = case.inputs
    start = time.perf_counter()
    with case.modes.on():
        (compiled if case.compiled_shape else served)(*args, **kwargs)
    return time.perf_counter() - start


def warm_up(
    compiled: Callable[..., Any],
    served: Callable[..., Any],
    cases: Sequence[Case],
    first_calls: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> float:
    """Calls the model with each case, as `run_case` does; the second call shows how long a request will take.

    Args:
        compiled: See `run_case`.
        served: See `run_case`.
        cases: The calls.
        first_calls: Is entered around the first call of each case.

    Returns:
        Seconds in total.
    """
    start = time.perf_counter()
    for position, case in enumerate(cases, 1):
        begin_step(f"compiling and running shape ({case.name})", position, len(cases))
        for number in range(ROUNDS):
            with first_calls() if number == 0 else nullcontext():
                last = run_case(compiled, served, case)
        logger.info(
            "Warm-up %d of %d: %s, %.1f s so far, %.1f ms a call",
            position, len(cases), case.name, time.perf_counter() - start, last * 1e3,
        )  # fmt: skip
    return time.perf_counter() - start


def startup_advice(seconds: float, timeout: int) -> str | None:
    """Returns what to change if loading came close to TorchServe's ``startupTimeout`` (s); None if it did not."""
    if seconds <= SAFE_SHARE * timeout:
        return None
    return (
        f"loading took {seconds:.0f} s of the {timeout} s that startupTimeout allows; a busier machine would miss it. "
        f"Set startupTimeout: {int(seconds * 2.5) + 30} or compile fewer shapes (handler.openvino.batching)"
    )
