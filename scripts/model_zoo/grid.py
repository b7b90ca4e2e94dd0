"""The grid of cases: sizes, padding, precision, shapes and cache, so chosen that few cases cover all pairs."""

import functools
import itertools
from dataclasses import asdict, dataclass
from typing import Any

HEADS = (128, 64, 256, 96, 80)
LENGTHS = (64, 33, 257, 1)
# The first value of each axis is in the first case, which costs the least.
AXES: dict[str, tuple[Any, ...]] = {
    "head": HEADS,
    "length": LENGTHS,
    "padding": ("left", "right"),
    "precision": ("f32", "bf16"),
    "dynamic": (False, True),
    "cache": (False, True),
    "threads": (2, 1),
}
# Those of every architecture.
COMMON = frozenset({"precision", "dynamic", "threads"})


@dataclass(frozen=True)
class Case:
    """One way of running an architecture.

    Attributes:
        head: Size of an attention head.
        length: Tokens of a text; pictures and recordings have about as many patches or frames.
        padding: Side on which the second row of a batch is padded; without meaning where a model takes no mask.
        precision: OpenVINO's inference precision.
        dynamic: Whether sizes are symbolic; the second call then has another length.
        cache: Whether a decoder returns its cache, and is called with one more token and this cache.
        threads: Number of threads of OpenVINO.
    """

    head: int = 128
    length: int = 64
    padding: str = "left"
    precision: str = "f32"
    dynamic: bool = False
    cache: bool = False
    threads: int = 2

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)

    def __str__(self) -> str:
        shapes, cache = "dynamic" if self.dynamic else "static", "cache" if self.cache else "no cache"
        parts = (f"head {self.head}", f"length {self.length}", f"{self.padding} padding", self.precision, shapes, cache)
        return ", ".join((*parts, f"{self.threads} thread{'s' if self.threads > 1 else ''}"))


def cases(heads: tuple[int, ...] = HEADS, threads: int = 0) -> list[Case]:
    """Returns cases that contain each pair of values of two axes; the first few contain each single value.

    Args:
        heads: Head sizes.
        threads: The only number of threads; 0 for one and two.
    """
    axes = {**AXES, "head": heads, "threads": (threads,) if threads else AXES["threads"]}
    return [Case(**dict(zip(axes, row, strict=True))) for row in _rows(tuple(axes.values()))]


def values_covered(chosen: list[Case]) -> int:
    """Returns the number of leading cases that contain each value that any of the cases contains."""
    every = {pair for case in chosen for pair in case.to_dict().items()}
    seen: set[tuple[str, Any]] = set()
    for number, case in enumerate(chosen, 1):
        seen |= set(case.to_dict().items())
        if seen == every:
            return number
    return 0


@functools.cache
def _rows(axes: tuple[tuple[Any, ...], ...]) -> list[tuple[Any, ...]]:
    """Greedy pairwise coverage: each row is the first of those with the most new values, then new pairs."""
    rows = [tuple(axis[0] for axis in axes)]
    values, pairs = set(_values(rows[0])), set(_pairs(rows[0]))
    candidates = list(itertools.product(*axes))
    every = {pair for row in candidates for pair in _pairs(row)}
    while pairs != every:
        best = max(candidates, key=lambda row: (len(_values(row) - values), len(_pairs(row) - pairs)))
        rows.append(best)
        values |= _values(best)
        pairs |= _pairs(best)
    return rows


def _values(row: tuple[Any, ...]) -> set[tuple[int, Any]]:
    return set(enumerate(row))


def _pairs(row: tuple[Any, ...]) -> set[tuple[tuple[int, Any], ...]]:
    return set(itertools.combinations(enumerate(row), 2))


def distinct(chosen: list[Case], axes: frozenset[str]) -> list[Case]:
    """Returns the cases without those that equal an earlier one in all axes that an architecture has.

    Args:
        chosen: The cases.
        axes: Names of those axes.
    """
    firsts: dict[tuple[Any, ...], Case] = {}
    for case in chosen:
        firsts.setdefault(tuple(value for axis, value in case.to_dict().items() if axis in axes), case)
    return list(firsts.values())
