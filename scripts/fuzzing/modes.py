"""Command-line filters, which change how a program runs but not the program."""

from __future__ import annotations

from typing import Any

from fuzzing.generate import BACKENDS, GRADS, OPEN, SHAPES, generate, opened
from fuzzing.generate_real import generate_real
from fuzzing.program import Program

_DYNAMIC = {"static": False, "dynamic": True, "both": None}
_PRECISIONS = ("f32", "bf16")
_THREADS = {"one_thread": 1, "two_threads": 2}
NAMES = (
    *BACKENDS, *SHAPES, *GRADS, "frozen", "guarded", "train", "eval", *(f"open_{kind}" for kind in OPEN), "real_sizes",
    *_PRECISIONS, *_THREADS,
)  # fmt: skip


def parse(text: str) -> dict[str, Any]:
    """Parses ``--mode``: names separated by commas.

    Raises:
        ValueError: A name is not in `NAMES`.
    """
    filters: dict[str, Any] = {}
    for name in filter(None, text.split(",")):
        if name in BACKENDS:
            filters["backend"] = name
        elif name in SHAPES:
            filters["dynamic"] = _DYNAMIC[name]
        elif name.startswith("open_") and name in NAMES:
            filters["open"] = name.removeprefix("open_")
        elif name in GRADS:
            filters["grad"] = name
        elif name in {"frozen", "guarded"}:
            filters["frozen"] = name == "frozen"
        elif name in {"train", "eval"}:
            filters["train"] = name == "train"
        elif name in _PRECISIONS:
            filters["precision"] = name
        elif name in _THREADS:
            filters["threads"] = _THREADS[name]
        elif name == "real_sizes":
            filters["real_sizes"] = True
        else:
            raise ValueError(f"{name!r} is none of {', '.join(NAMES)}")
    return filters


def generated(seed: int, index: int, filters: dict[str, Any]) -> Program:
    """Model ``index`` of a seed, as the filters say."""
    return changed((generate_real if "real_sizes" in filters else generate)(seed, index), filters)


def changed(program: Program, filters: dict[str, Any]) -> Program:
    """The program, to be run as the filters say."""
    program = program.with_mode(**filters) if filters else program
    return opened(program, filters["open"]) if "open" in filters else program
