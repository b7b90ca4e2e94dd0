"""Describes each value of a program well enough for another program to take it as an input."""

from __future__ import annotations

from typing import Any

import torch

from fuzzing.context import plain_cond
from fuzzing.program import Program, line_source
from fuzzing.run import module_of
from fuzzing.values import arguments


def describe(program: Program) -> dict[str, dict[str, Any]]:
    """Maps names of values to the fields of `reduce.Known`."""
    first, second = _values(program, "A"), {}
    if program.mode.sizes[0] != program.mode.sizes[1]:
        second = _values(program, "C")
    lines = {}
    for name, tensor in first.items():
        kind, low, high = "normal", 0, 1
        if tensor.dtype is torch.bool:
            kind = "bool"
        elif not tensor.is_floating_point():
            kind = "index"
            low, high = (int(tensor.min()), int(tensor.max()) + 1) if tensor.numel() else (0, 1)
        elif tensor.numel() and torch.equal(tensor * 64, (tensor * 64).round()):
            kind = "distinct" if len(tensor.unique()) == tensor.numel() else "grid"
        shape = _with_constants(_named(tensor, second.get(name), program) if second else list(tensor.shape), program)
        dtype = str(tensor.dtype).removeprefix("torch.")
        lines[name] = {"shape": shape, "dtype": dtype, "kind": kind, "low": low, "high": high}
    return lines


def _with_constants(shape: list[int | str] | None, program: Program) -> list[int | str] | None:
    """Names the sizes of the model's constants, so that they become smaller together."""
    names = {size: name for name, size in program.constants.items()}
    return [names.get(size, size) for size in shape] if shape else shape  # type: ignore[call-overload]


def _values(program: Program, step: str) -> dict[str, torch.Tensor]:
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "self": module_of(program), "cond": plain_cond}
    space |= program.constants
    space |= dict(zip([i.name for i in program.inputs], arguments(program, step, False), strict=True))
    seen: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for line in program.lines:
            try:
                exec(line_source(line), space)
            except Exception:
                # The values before this line are still known.
                break
            seen |= {name: space[name].clone() for name in line.out if isinstance(space[name], torch.Tensor)}
    return {i.name: space[i.name] for i in program.inputs} | seen


def _named(first: torch.Tensor, second: torch.Tensor | None, program: Program) -> list[int | str] | None:
    if second is None or first.dim() != second.dim():
        return None
    sizes = program.mode.sizes
    shape: list[int | str] = []
    for a, b in zip(first.shape, second.shape, strict=True):
        name = next((n for n in sizes[0] if (sizes[0][n], sizes[1][n]) == (a, b)), None)
        if a != b and name is None:
            return None
        shape.append(a if a == b else name)  # type: ignore[arg-type]
    return shape
