"""Inputs of a program's calls: the same for a seed in every process."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fuzzing.program import Input, Program, Size
from fuzzing.real_values import is_real_kind, real_values


def arguments(program: Program, step: str, grad: bool) -> list[torch.Tensor]:
    """The arguments of `forward`.

    Args:
        program: The program.
        step: One letter of `Mode.steps`; decides sizes and values.
        grad: Whether float inputs may require gradients.
    """
    sizes = program.sizes_of(step)
    tensors: dict[str, torch.Tensor] = {}
    for position, spec in enumerate(program.inputs):
        if spec.same_as in tensors:
            tensors[spec.name] = tensors[spec.same_as]
            continue
        generator = torch.Generator().manual_seed((program.seed * 31 + position) * 7 + ord(step))
        tensor = _laid_out(_values(spec, sizes, generator, step), spec.layout)
        tensors[spec.name] = tensor.requires_grad_() if grad and spec.grad and tensor.is_floating_point() else tensor
    return list(tensors.values())


def number(size: Size, sizes: Mapping[str, int]) -> int:
    """A size or a bound as a number: ``S`` is the size of that name, ``-S`` its negative, ``(n0 * n1)`` a product."""
    return size if isinstance(size, int) else int(eval(size, {"__builtins__": {}}, dict(sizes)))


def _values(spec: Input, sizes: Mapping[str, int], generator: torch.Generator, step: str) -> torch.Tensor:
    shape = [number(size, sizes) for size in spec.shape]
    dtype: torch.dtype = getattr(torch, spec.dtype)
    kind = spec.kind
    if kind == "normal":
        return torch.randn(shape, generator=generator).to(dtype)
    if kind == "positive":
        return (torch.rand(shape, generator=generator) + 0.25).to(dtype)
    if kind == "grid":
        return (torch.randint(-16, 17, shape, generator=generator) / 8).to(dtype)
    if kind == "distinct":
        count = torch.Size(shape).numel()
        return ((torch.randperm(count, generator=generator) - count // 2) / 8).reshape(shape).to(dtype)
    if kind == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    if kind == "index":
        low, high = number(spec.low, sizes), number(spec.high, sizes)
        tensor = torch.randint(low, max(high, low + 1), shape, generator=generator, dtype=dtype)
        return tensor + (high - low) if step == "X" else tensor
    if kind == "large":
        # Only call B has values that do not fit 32 bits.
        tensor = torch.randint(-1000, 1000, shape, generator=generator, dtype=dtype)
        return tensor * (3_000_017 if step == "B" else 1)
    if is_real_kind(kind):
        return real_values(kind, shape, dtype, generator, number(spec.low, sizes))
    if kind in {"mask_bool", "mask_inf", "mask_min"}:
        allowed = torch.rand(shape, generator=generator) < 0.6
        if allowed.numel() and torch.rand((), generator=generator) < 0.6:
            allowed[..., 0, :] = False
        if kind == "mask_bool":
            return allowed
        forbidden = float("-inf") if kind == "mask_inf" else torch.finfo(dtype).min
        return torch.zeros(shape, dtype=dtype).masked_fill(~allowed, forbidden)
    raise ValueError(f"unknown kind of values {kind!r}")


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided" and tensor.dim():
        wide = torch.zeros([*tensor.shape[:-1], tensor.shape[-1] * 2], dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "offset":
        flat = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)
        flat[3:] = tensor.reshape(-1)
        return flat[3:].view(tensor.shape)
    return tensor
