"""Smaller variants of a program, for shrinking."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuzzing.program import VALUE_NAME, Input, Line, Mode, Program, Size
from fuzzing.real_values import FLOAT_KINDS


@dataclass(frozen=True)
class Known:
    """A value that eager computed, described well enough to replace it by an input.

    Attributes:
        shape: With names of sizes that differ between calls; None if unknown.
        dtype: Without ``torch.``.
        kind: As `Input.kind`.
    """

    shape: tuple[Size, ...] | None
    dtype: str
    kind: str
    low: int = 0
    high: int = 1

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Known:
        """From the result of `describe`, after JSON."""
        shape = tuple(data["shape"]) if data["shape"] is not None else None
        return Known(shape, data["dtype"], data["kind"], data["low"], data["high"])


def tidy(program: Program) -> Program:
    """Removes unneeded inputs, state and lines; lines with effects stay."""
    needed = set(program.results)
    kept: list[Line] = []
    for line in reversed(program.lines):
        keeps_state = any(name[0] in "ab" or program.mode.train for name in line.uses)
        if line.writes or keeps_state or not line.out or needed & set(line.out):
            kept.append(line)
            needed |= set(line.args)
    lines = tuple(reversed(kept))
    inputs = [i for i in program.inputs if i.name in needed]
    names = {i.name for i in inputs}
    inputs = [replace(i, same_as=i.same_as if i.same_as in names else "") for i in inputs]
    used = {name for line in lines for name in line.uses}
    state = {name: code for name, code in program.state.items() if name in used or f"self.{name}" in program.returned}
    return replace(program, lines=lines, inputs=tuple(inputs), state=state).without_unused_constants()


def simpler_modes(program: Program, failing: int) -> Iterator[Program]:
    """Simpler modes."""
    mode = program.mode
    steps = mode.steps
    shorter = [steps[: failing + 1], "A", "AA", "AB", "AC", "AAA", "AAB", "AX", "X"]
    for text in dict.fromkeys(shorter):
        if len(text) < len(steps):
            yield program.with_mode(steps=text)
    for change in (
        {"open": ""}, {"train": False}, {"frozen": False}, {"backend": "openvino"}, {"dynamic": False},
        {"dynamic": True}, {"grad": "no_grad"}, {"options": {"min_partition_us": 0}}, {"precision": "f32"},
        {"threads": 1},
    ):  # fmt: skip
        if any(getattr(mode, key) != value for key, value in change.items()) and not (
            change == {"dynamic": True} and mode.dynamic is False
        ):
            yield program.with_mode(**change)


def fewer_results(program: Program) -> Iterator[Program]:
    """Return one value, two, or all but one; a plain tuple; values instead of expressions."""
    parts = program.returns
    for part in dict.fromkeys(parts):
        if len(parts) > 1:
            yield replace(program, returns=(part,))
    pairs = [(a, b) for i, a in enumerate(parts) for b in parts[i + 1 :]] if len(parts) > 2 else []
    for pair in pairs:
        yield replace(program, returns=pair)
    for gone in range(len(parts)) if len(parts) > 3 else ():
        yield replace(program, returns=(*parts[:gone], *parts[gone + 1 :]))
    if len(parts) > 1 and program.form != "tuple":
        yield replace(program, form="tuple")
    for i, part in enumerate(parts):
        for name in VALUE_NAME.findall(part):
            if name != part:
                yield replace(program, returns=(*parts[:i], name, *parts[i + 1 :]))


def without_lines(program: Program, known: Mapping[str, Known]) -> Iterator[Program]:
    """Remove lines, many at first; values that later lines need become inputs or arguments of the removed line."""
    count = len(program.lines)
    size = max(1, count // 2)
    while size:
        for start in range(0, count, size):
            gone = program.lines[start : start + size]
            if cut := _cut(program, gone, known):
                yield cut
            if size == 1 and (joined := _bypassed(program, gone[0], known)):
                yield joined
        size //= 2


def simpler_inputs(program: Program) -> Iterator[Program]:
    """Plain layouts, separate tensors, no gradients, plain values."""
    for position, spec in enumerate(program.inputs):
        for change in ({"layout": "plain"}, {"same_as": ""}, {"grad": False}, {"kind": "normal"}):
            if change == {"kind": "normal"} and spec.kind not in {"positive", *FLOAT_KINDS}:
                continue
            if all(getattr(spec, key) == value for key, value in change.items()):
                continue
            inputs = list(program.inputs)
            inputs[position] = replace(spec, **change)  # type: ignore[arg-type]
            yield replace(program, inputs=tuple(inputs))


def smaller_sizes(program: Program) -> Iterator[Program]:
    """Smaller constants and named sizes: all halved, then each as small as possible, half, and one less."""
    sizes = {**program.constants, **program.mode.sizes[0]}
    if all_halved := {name: max(1, size // 2) for name, size in sizes.items() if size > 1}:
        yield _sized(program, all_halved)
    for name, size in sorted(sizes.items(), key=lambda pair: -pair[1]):
        for smaller in dict.fromkeys((1, 2, size // 8, size // 2, size * 3 // 4, size - size % 32, size - 1)):
            if 0 < smaller < size:
                yield _sized(program, {name: smaller})


def _sized(program: Program, sizes: Mapping[str, int]) -> Program:
    first, second = program.mode.sizes
    apart = {name: second[name] - size for name, size in first.items()}
    first = {name: sizes.get(name, size) for name, size in first.items()}
    second = {name: size + apart[name] for name, size in first.items()}
    constants = {name: sizes.get(name, size) for name, size in program.constants.items()}
    return replace(program.with_mode(sizes=(first, second)), constants=constants)


def _cut(program: Program, gone: Sequence[Line], known: Mapping[str, Known]) -> Program | None:
    left = [line for line in program.lines if line not in gone]
    needed = {arg for line in left for arg in line.args} | program.results
    inputs = list(program.inputs)
    for name in (name for line in gone for name in line.out if name in needed):
        value = known.get(name)
        if value is None or value.shape is None:
            return None
        inputs.append(Input(name, value.shape, value.dtype, value.kind, value.low, value.high, grad=True))
    return replace(program, lines=tuple(left), inputs=tuple(inputs)) if left else None


def _bypassed(program: Program, gone: Line, known: Mapping[str, Known]) -> Program | None:
    if len(gone.out) != 1 or gone.out[0] not in known:
        return None
    output = known[gone.out[0]]
    for arg in gone.args:
        if arg in known and (known[arg].shape, known[arg].dtype) == (output.shape, output.dtype):
            return _renamed(program, gone, arg)
    return None


def _renamed(program: Program, gone: Line, name: str) -> Program:
    old = gone.out[0]
    lines = tuple(
        replace(line, args=tuple(name if a == old else a for a in line.args))
        for line in program.lines
        if line is not gone
    )
    returns = tuple(VALUE_NAME.sub(lambda m: name if m.group() == old else m.group(), part) for part in program.returns)
    return replace(program, lines=lines, returns=returns)


def signature(program: Program, kind: str) -> str:
    """Identifies a failure: equal for programs that seem to fail alike."""
    codes = sorted(re.sub(r"self\.\w+|\bn\d+|\d+", "#", line.code) for line in program.lines)
    state = sorted(code.split("(")[0] for code in program.state.values())
    returns = ", ".join(VALUE_NAME.sub("v", part) for part in program.returns)
    return f"{kind} | {'; '.join(codes)} | {', '.join(state)} | {returns}"


def mode_text(mode: Mode) -> str:
    """A short description of a mode."""
    shapes = {False: "static", True: "dynamic", None: "static then dynamic"}[mode.dynamic]
    shapes = {"sizes": "open sizes", "ones": "open sizes, 1 too"}.get(mode.open, shapes)
    parts = [mode.backend, shapes, mode.grad, *(["frozen"] if mode.frozen else []), *(["train"] if mode.train else [])]
    parts += [mode.precision] * (mode.precision != "f32") + [f"{mode.threads} threads"] * (mode.threads > 1)
    return f"{', '.join(parts)}, calls {mode.steps}"
