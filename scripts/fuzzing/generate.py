"""Generates a random program from a seed: how it runs, its inputs, 3 to 25 operators, and what it returns."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from fuzzing import (  # noqa: F401
    ops_attention,
    ops_elementwise,
    ops_index,
    ops_nn,
    ops_quantized,
    ops_reduce,
    ops_shape,
    ops_state,
)
from fuzzing.context import Context
from fuzzing.draft import Skip, Val
from fuzzing.program import Mode, Program
from fuzzing.registry import ENTRIES

BACKENDS = ("openvino", "openvino_ts", "export")
SHAPES = ("static", "dynamic", "both")
OPEN = ("sizes", "ones")
GRADS = ("no_grad", "inference_mode", "grad")
_SHAPES = (["B", 4], ["B", "S"], ["B", "S", 4], ["B", "S", 6], ["B", 2, "S", 5], ["B", 3, 4, 4], [4], [3, 5], ["S"], [])
_LEAST, _MOST = 3, 25
# Share of programs with two sets of sizes that run with open sizes.
_OPEN = 0.2
# Attempts per line: most operators fit some value.
_ATTEMPTS = 12


def draw_mode(rng: random.Random) -> Mode:
    """Draws how a program runs."""
    backend = rng.choices(BACKENDS, [5, 2, 2])[0]
    # Tracing with symbolic sizes takes five times as long.
    shapes = rng.choices(SHAPES, [6, 1, 2])[0]
    frozen = rng.random() < 0.35
    grad = rng.choices(GRADS, [5, 3, 2])[0]
    train = rng.random() < 0.12
    batch, length = rng.choice([2, 2, 2, 3, 1]), rng.choice([3, 4, 5, 1])
    first = {"B": batch, "S": length}
    second = {"B": batch + rng.choice([1, 2, 0]), "S": length + rng.choice([1, 3, 2])}
    if shapes == "static" and rng.random() < 0.7:
        second = first
    steps = {"static": "ABA", "dynamic": "ACBA", "both": "ACDBA"}[shapes]
    if frozen:
        # Two equal calls record a frozen call, which is used from the third on.
        steps = {"static": "AABA", "dynamic": "AACBCDA", "both": "AACCDBA"}[shapes]
    elif rng.random() < 0.2:
        steps += "WAB"
    if rng.random() < 0.25:
        steps += "X"
    if first == second:
        steps = steps.replace("C", "").replace("D", "")
    dynamic = {"static": False, "dynamic": True, "both": None}[shapes]
    options = {"min_partition_us": 0} if rng.random() < 0.85 else {}
    return Mode(backend, dynamic, frozen, grad, train, (first, second), steps, options)


def generate(seed: int, index: int) -> Program:
    """Model ``index`` of a seed: the same in every process, independent of what ran before."""
    rng = random.Random(f"{seed}:{index}")
    while True:
        mode = draw_mode(rng)
        program = _write(rng, mode, rng.randrange(1 << 30))
        if program is not None:
            break
    mode = program.mode
    # Drawn separately, so that `_OPEN` does not change the programs of a seed.
    apart = random.Random(f"{seed}:{index}:open")
    if mode.backend != "export" and mode.sizes[0] != mode.sizes[1] and apart.random() < _OPEN:
        return opened(program, apart.choice(OPEN))
    return program


def opened(program: Program, kind: str) -> Program:
    """The same program with one graph for several sizes; see `Mode.open`."""
    mode, (first, second) = program.mode, program.mode.sizes
    if first == second:
        second = {name: size + 1 for name, size in first.items()}
    steps = "AACBCDA" if mode.frozen else "ACDBA"
    changes = "WACB" if "W" in mode.steps and not mode.frozen else ""
    beyond = "X" if "X" in mode.steps else ""
    return program.with_mode(dynamic=False, open=kind, sizes=(first, second), steps=steps + changes + beyond)


@functools.lru_cache(maxsize=1)
def _entries() -> tuple[tuple[str, ...], tuple[float, ...]]:
    return tuple(ENTRIES), tuple(entry.weight for entry in ENTRIES.values())


def _write(rng: random.Random, mode: Mode, seed: int) -> Program | None:
    torch.manual_seed(seed)
    dtype = rng.choices(["float32", "bfloat16", "float16"], [8, 1, 1])[0]
    g = Context(rng, mode, seed, dtype)
    for _ in range(rng.choice([1, 1, 2, 2, 3])):
        kind = rng.choices(["normal", "grid", "distinct", "positive"], [4, 4, 2, 1])[0]
        g.input(rng.choice(_SHAPES), dtype if rng.random() < 0.9 else "float32", kind)
    if rng.random() < 0.3:
        g.input(rng.choice(_SHAPES[:5]), "bool", "bool")
    if rng.random() < 0.3:
        g.input(rng.choice(_SHAPES[:5]), rng.choice(["int64", "int32"]), "index", -4, 9)
    if rng.random() < 0.04:
        g.input(rng.choice(_SHAPES[:5]), "int64", "large")
    if rng.random() < 0.03:
        with contextlib.suppress(Skip):
            g.twin_input()
    budget = rng.randint(_LEAST, _MOST if rng.random() < 0.25 else 10)
    names, weights = _entries()
    for _ in range(budget * _ATTEMPTS):
        if len(g.lines) >= budget:
            break
        name = rng.choices(names, weights)[0]
        try:
            g.add(name, ENTRIES[name].build(g))
        except Skip:
            continue
    if len(g.lines) < _LEAST:
        return None
    return finished(g, rng, mode, seed)


def finished(g: Context, rng: random.Random, mode: Mode, seed: int, every: bool = False) -> Program:
    """The program of what a context holds, with a choice of what it returns.

    Args:
        g: The context.
        rng: Source of the choice.
        mode: How the program runs.
        seed: Of its values.
        every: Whether to return all values that nothing uses, up to eight.
    """
    unused = [v for v in g.values if not v.used and v.name.startswith("v")]
    chosen = unused[-(8 if every else rng.choice([1, 2, 2, 3, 4])) :] or [g.values[-1]]
    computed = [v for v in g.values if v.name.startswith("v")]
    if rng.random() < 0.25 and computed:
        chosen.append(rng.choice(computed))
    if rng.random() < 0.12:
        chosen.append(rng.choice(g.values))
    steps = mode.steps
    if "X" in steps and not any(i.kind == "index" for i in g.inputs):
        steps = steps.replace("X", "")
    form = rng.choices(["tuple", "list", "dict", "nested"], [12, 3, 3, 2])[0]
    returns = _returned(g, rng, chosen)
    return Program(seed, tuple(g.inputs), dict(g.state), tuple(g.lines), returns, form, replace(mode, steps=steps),
                   dict(g.constants))  # fmt: skip


def _returned(g: Context, rng: random.Random, chosen: Sequence[Val]) -> tuple[str, ...]:
    """The returned expressions: values, inputs, views, duplicates, constants."""
    parts = [value.name for value in chosen]
    value = rng.choice(g.values)
    extra = rng.random()
    if extra < 0.10:
        parts.append(rng.choice(g.inputs).name)
    elif extra < 0.16:
        parts.append(parts[0])
    elif extra < 0.24 and value.dim:
        view = rng.choice(["[0]", ".unsqueeze(0)", "[..., :1]", ".transpose(0, -1)", ".reshape(-1)"])
        parts.append(f"{value.name}{view}")
    elif extra < 0.32:
        parts.append(rng.choice(["None", "3", "2.5", '"text"', "True", f"{value.name}.dim()", f"{value.name}.shape"]))
    elif extra < 0.36 and (kept := [name for name in g.state if name[0] == "b"]):
        parts.append(f"self.{rng.choice(kept)}")
    rng.shuffle(parts)
    return tuple(parts)
