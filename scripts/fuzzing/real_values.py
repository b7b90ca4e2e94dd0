"""Values that expose errors at real sizes: cancellation, outliers, ties, infinities, limits of integers, masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# What a mask holds where attention is forbidden; ``bool`` masks hold False.
FORBIDDEN = {"inf": float("-inf"), "min": None, "1e4": -1e4, "1e9": -1e9}
# The share of forbidden positions of random masks.
_CLOSED = 0.4
_FLOATS: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    # Sums of squares cancel against squares of sums, and long sums lose digits.
    "offset": lambda normal, generator: normal + 10,
    "far": lambda normal, generator: normal + 100,
    # Magnitudes of several orders beside each other.
    "spread": lambda normal, generator: normal * torch.randn(normal.shape, generator=generator).exp(),
    "small": lambda normal, generator: normal * 1e-3,
    # As in the residual stream of language models: a few channels are much larger.
    "outliers": lambda normal, generator: normal * _periodic(normal.shape, 61, 40.0),
    "ties": lambda normal, generator: (normal * 2).round() / 2,
}
FLOAT_KINDS = (*_FLOATS, "infinite")
STRUCTURES = ("random", "padding", "left", "causal", "left_causal", "band")


def is_real_kind(kind: str) -> bool:
    """Whether `real_values` makes values of this kind."""
    return kind in FLOAT_KINDS or kind == "limits" or kind.rpartition("_")[0] in STRUCTURES


def real_values(
    kind: str, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, least: int
) -> torch.Tensor:
    """Values of one of these kinds.

    Args:
        kind: One of `FLOAT_KINDS`; ``limits``, integers near the limits of their type; or a mask: one of `STRUCTURES`
            and, after an underscore, ``bool`` or one of `FORBIDDEN`.
        shape: Of the tensor.
        dtype: Of the tensor.
        generator: Source of the values.
        least: The least number of open positions in each row of a mask.
    """
    if kind in _FLOATS:
        return _FLOATS[kind](torch.randn(shape, generator=generator), generator).to(dtype)
    if kind == "infinite":
        return _partly_infinite(torch.randn(shape, generator=generator), generator).to(dtype)
    if kind == "limits":
        return _near_limits(shape, dtype, generator)
    structure, _, form = kind.rpartition("_")
    allowed = _allowed(structure, shape, generator, least)
    if form == "bool":
        return allowed
    low = torch.finfo(dtype).min if form == "min" else FORBIDDEN[form]
    return torch.zeros(shape, dtype=dtype).masked_fill(~allowed, low)  # type: ignore[arg-type]


def _periodic(shape: Sequence[int], period: int, value: float) -> torch.Tensor:
    factor = torch.ones(shape[-1] if len(shape) else 1)
    factor[period // 2 :: period] = value
    return factor if len(shape) else factor[0]


def _partly_infinite(normal: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """-inf from a random position of each row on, as where padding was masked, and at single positions."""
    if not normal.dim() or not normal.numel():
        return normal
    starts = torch.randint(0, normal.shape[-1] + 1, [*normal.shape[:-1], 1], generator=generator)
    single = torch.rand(normal.shape, generator=generator) < 0.02
    return normal.masked_fill((torch.arange(normal.shape[-1]) >= starts) | single, float("-inf"))


def _near_limits(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    info = torch.iinfo(dtype)
    # What float32 holds exactly, beyond which this package checks or refuses integers.
    top, bottom = min(info.max, (1 << 24) - 1), max(info.min, 1 - (1 << 24))
    special = torch.tensor([bottom, bottom + 1, max(bottom, -1), 0, 1, 2, top // 2, top // 2 + 1, top - 1, top])
    usual = torch.randint(max(bottom, -100), min(top, 100) + 1, shape, generator=generator)
    chosen = special[torch.randint(0, len(special), shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < 0.5, chosen, usual).to(dtype)


def _allowed(structure: str, shape: Sequence[int], generator: torch.Generator, least: int) -> torch.Tensor:
    queries, keys = (shape[-2] if len(shape) > 1 else 1), shape[-1]
    key, query = torch.arange(keys), torch.arange(queries).unsqueeze(-1) + keys - queries
    rows = [shape[0], *[1] * (len(shape) - 1)] if len(shape) > 2 else [1] * len(shape)
    lengths = torch.randint(min(least, keys), keys + 1, rows, generator=generator)
    if structure == "random":
        allowed = torch.rand(shape, generator=generator) >= _CLOSED
        if least:
            allowed[..., :least] = True
        else:
            allowed[..., 0, :] = False
    elif structure == "padding":
        allowed = key < lengths
    elif structure == "left":
        allowed = key >= keys - lengths
    elif structure == "causal":
        allowed = key <= query
    elif structure == "left_causal":
        allowed = (key <= query) & (key >= keys - lengths)
    else:
        allowed = (key - query).abs() <= max(1, keys // 8)
    if least and structure in {"causal", "left_causal"}:
        # Rows before the first token see themselves, as in published models.
        allowed = allowed | (key == query.clamp(min=0))
    return allowed.expand(shape).clone()
