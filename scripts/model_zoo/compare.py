"""Compares the answers of two models, whatever objects they are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_DEEPEST = 12


def tensors(answer: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of an answer with their names: outputs of models, their caches, structures of them."""
    if isinstance(answer, torch.Tensor):
        yield name, answer
    elif depth > _DEEPEST or answer is None or isinstance(answer, str | bytes | int | float | torch.nn.Module | type):
        return
    elif isinstance(answer, Mapping):
        for key, value in answer.items():
            yield from tensors(value, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(answer, list | tuple):
        for number, value in enumerate(answer):
            yield from tensors(value, f"{name}[{number}]", depth + 1)
    elif dataclasses.is_dataclass(answer):
        for field in dataclasses.fields(answer):
            yield from tensors(getattr(answer, field.name), f"{name}.{field.name}", depth + 1)
    elif type(answer).__module__.startswith("transformers") and not hasattr(answer, "to_diff_dict"):
        for key, value in vars(answer).items():
            yield from tensors(value, f"{name}.{key}" if name else key, depth + 1)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest difference of two answers.

    Attributes:
        largest: Relative to the largest value of the tensor; infinite for another structure, shape, type or NaN.
        detail: Where, and both values.
    """

    largest: float = 0.0
    detail: str = ""


def difference(ours: Any, expected: Any, floats_only: bool = False) -> Difference:
    """Compares two answers.

    Args:
        ours: The answer to judge.
        expected: Eager's answer. Where it is not finite, values are not compared.
        floats_only: Whether integers may differ, which follow from the rounding of floats.
    """
    mine, theirs = dict(tensors(ours)), dict(tensors(expected))
    if mine.keys() != theirs.keys():
        names = sorted(mine.keys() ^ theirs.keys())
        return Difference(float("inf"), f"other outputs: {', '.join(names[:4])}")
    worst = Difference()
    for name, b in theirs.items():
        result = _of_tensors(name, mine[name], b, floats_only)
        if result.largest > worst.largest:
            worst = result
    return worst


def _of_tensors(name: str, a: torch.Tensor, b: torch.Tensor, floats_only: bool) -> Difference:
    if a.dtype != b.dtype or (a.shape != b.shape and not floats_only):
        return Difference(float("inf"), f"{name}: {a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}")
    if a.shape != b.shape or not b.numel():
        return Difference()
    if not b.is_floating_point() and not b.is_complex():
        wrong = a != b
        count = 0 if floats_only else int(wrong.sum())
        return Difference(count / wrong.numel(), f"{name}: {count} of {wrong.numel()} integers differ")
    if b.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.detach().double(), b.detach().double()
    finite = b.isfinite()
    if bool((~a.isfinite() & finite).any()):
        return Difference(float("inf"), f"{name}: {int((~a.isfinite() & finite).sum())} of {a.numel()} are NaN or Inf")
    scale = float(b[finite].abs().max()) if bool(finite.any()) else 1.0
    apart = torch.where(finite, (a - b).abs(), 0.0)
    position = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    largest = float(apart.max()) / max(scale, 1e-6)
    return Difference(
        largest, f"{name}: at {list(position)} {a[position].item():.5g} instead of {b[position].item():.5g}"
    )
