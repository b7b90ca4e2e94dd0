"""The operators that programs are made of: each entry writes one line, or raises `Skip`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuzzing.context import Context
from fuzzing.draft import Draft, Val
from fuzzing.real_context import RealContext

Build = Callable[[Context], Draft]


@dataclass(frozen=True)
class Entry:
    """One operator.

    Attributes:
        name: Name in programs and reports.
        build: Chooses arguments and writes the line; raises `Skip` if nothing fits.
        weight: Relative frequency.
    """

    name: str
    build: Build
    weight: float = 1.0


ENTRIES: dict[str, Entry] = {}


def op(weight: float = 1.0) -> Callable[[Build], Build]:
    """Registers a function as an entry."""

    def register(build: Build) -> Build:
        add(build.__name__, build, weight)
        return build

    return register


def add(name: str, build: Build, weight: float = 1.0) -> None:
    """Registers an entry.

    Raises:
        ValueError: The name already exists.
    """
    if name in ENTRIES:
        raise ValueError(f"two operators are called {name}")
    ENTRIES[name] = Entry(name, build, weight)


@dataclass(frozen=True)
class Block:
    """Several lines of a published model, at real sizes.

    Attributes:
        name: Name in programs and reports.
        build: Adds the lines; raises `Skip` if they do not fit.
        weight: Relative frequency.
        takes: The kind of value that it continues: ``tokens``, ``image``, ``vectors``, ``ids`` or ``long``.
    """

    name: str
    build: Callable[[RealContext], None]
    weight: float
    takes: str


BLOCKS: dict[str, Block] = {}


def block(weight: float, takes: str) -> Callable[[Callable[[RealContext], None]], Callable[[RealContext], None]]:
    """Registers a function as a block of real sizes."""

    def register(build: Callable[[RealContext], None]) -> Callable[[RealContext], None]:
        BLOCKS[build.__name__] = Block(build.__name__, build, weight, takes)
        return build

    return register


def floating(value: Val) -> bool:
    return value.is_float


def integral(value: Val) -> bool:
    return value.is_int


def boolean(value: Val) -> bool:
    return value.is_bool


def numeric(value: Val) -> bool:
    return value.is_float or value.is_int


def exact(value: Val) -> bool:
    return value.exact or not value.is_float


def dims(*counts: int) -> Callable[[Val], bool]:
    return lambda value: value.dim in counts


def at_least(count: int) -> Callable[[Val], bool]:
    return lambda value: value.dim >= count


def like(other: Val) -> Callable[[Val], bool]:
    """Same dtype as ``other``, and a shape that broadcasts with its shape."""

    def fits(value: Val) -> bool:
        if value.dtype != other.dtype:
            return False
        pairs = zip(reversed(value.shape), reversed(other.shape), strict=False)
        return all(a == b or 1 in (a, b) for a, b in pairs)

    return fits


def wide_value(g: Context, dim: int) -> Val:
    """A non-empty float value with this many dimensions: an existing one or an input."""
    fits = [v for v in g.values if v.is_float and v.dim == dim and min(v.shape) > 0 and v.tensor.numel() <= 512]
    if fits and g.chance(0.8):
        return g.choice(fits)
    shape = {2: ["B", 4], 3: ["B", "S", 4], 4: ["B", 2, "S", 5]}[dim]
    return g.input(shape, g.float_dtype, g.choice(["normal", "grid"]))


def size_name(g: Context, size: int) -> int | str:
    """A size as the program writes it: by name if it may change between calls."""
    return next((name for name, value in g.mode.sizes[0].items() if value == size), size)
