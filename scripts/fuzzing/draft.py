"""What entries of the registry take and return: values of the program so far, and a line to add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


class Skip(Exception):
    """This operator can't be added here."""


@dataclass
class Draft:
    """A line to add.

    Attributes:
        code: As `Line.code`.
        args: Values; all other arguments are part of ``code``.
        exact: ``move`` never rounds, ``arith`` does not round values on the grid, ``no`` may round.
        out: Number of values that it defines; 0 for a statement.
        writes: Positions of arguments that it writes to.
        uses: As `Line.uses`.
    """

    code: str
    args: Sequence[Val]
    exact: str = "no"
    out: int = 1
    writes: tuple[int, ...] = ()
    uses: tuple[str, ...] = ()


@dataclass
class Val:
    """A value of the program, with its tensor in eager."""

    name: str
    tensor: torch.Tensor
    exact_storages: set[int] = field(repr=False)
    used: int = 0

    @property
    def exact(self) -> bool:
        """Whether every correct implementation computes the same bits."""
        return storage_of(self.tensor) in self.exact_storages

    @property
    def overlaps_itself(self) -> bool:
        """Whether elements share memory, as windows do: a write to one then changes others (docs/limits.md)."""
        offset = self.tensor.storage_offset()
        last = offset + sum((size - 1) * step for size, step in zip(self.shape, self.tensor.stride(), strict=True))
        places = torch.arange(last + 1).as_strided(self.shape, self.tensor.stride(), offset)
        return places.unique().numel() < places.numel()

    @property
    def dim(self) -> int:
        return self.tensor.dim()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def is_float(self) -> bool:
        return self.tensor.is_floating_point()

    @property
    def is_int(self) -> bool:
        return self.dtype in (torch.int64, torch.int32)

    @property
    def is_bool(self) -> bool:
        return self.dtype is torch.bool


def storage_of(tensor: torch.Tensor) -> int:
    """Identifies the memory of a tensor."""
    return tensor.untyped_storage().data_ptr() or id(tensor)
