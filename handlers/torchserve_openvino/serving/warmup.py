"""Runs the model on made-up inputs before READY, so that no request pays for compilation."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchserve_openvino.config.sections import WarmupInput

logger = logging.getLogger(__name__)

Inputs = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]


def make_inputs(declared: Sequence[WarmupInput], batch: int) -> Inputs:
    """Positional and keyword tensors of one batch, the same in every worker.

    Args:
        declared: ``handler.openvino.warmup.inputs``; shapes are those of one item.
        batch: Items in the batch.
    """
    generator = torch.Generator().manual_seed(0)
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    for spec in declared:
        tensor = _random(spec, (batch, *spec.shape), generator)
        if spec.name is None:
            args.append(tensor)
        else:
            kwargs[spec.name] = tensor
    return tuple(args), kwargs


def _random(spec: WarmupInput, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype.is_floating_point or dtype.is_complex:
        if spec.low is None and spec.high is None:
            return torch.randn(shape, generator=generator).to(dtype)
        low = spec.low if spec.low is not None else 0.0
        high = spec.high if spec.high is not None else low + 1.0
        return (torch.rand(shape, generator=generator) * (high - low) + low).to(dtype)
    first = int(spec.low or 0)
    last = int(spec.high) if spec.high is not None else first + 2
    return torch.randint(first, last, shape, generator=generator).to(dtype)


def warm_up(model: Callable[..., Any], batches: Sequence[Inputs], *, rounds: int = 2) -> float:
    """Calls the model with each batch; the second round shows what a request will take.

    Returns:
        Seconds for all of it.
    """
    start = time.perf_counter()
    for position, (args, kwargs) in enumerate(batches, 1):
        size = next((t.shape[0] for t in (*args, *kwargs.values())), 0)
        for _ in range(rounds):
            call = time.perf_counter()
            with torch.inference_mode():
                model(*args, **kwargs)
            last = time.perf_counter() - call
        logger.info(
            "Warm-up %d of %d: batch %d, %.1f s so far, %.1f ms a call",
            position, len(batches), size, time.perf_counter() - start, last * 1e3,
        )  # fmt: skip
    return time.perf_counter() - start
