"""Generates a program of real sizes from a seed: 2 to 5 published blocks, at sizes that users have."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from fuzzing import (  # noqa: F401
    blocks_attention,
    blocks_dense,
    blocks_image,
    blocks_long,
)
from fuzzing.draft import Skip
from fuzzing.generate import draw_mode, finished
from fuzzing.program import Mode, Program
from fuzzing.real_context import RealContext
from fuzzing.real_inputs import BATCHES, LENGTHS, SPATIAL, family
from fuzzing.registry import BLOCKS, ENTRIES, Entry

# Most tokens or pixels of a batch.
_MAX_ROWS = 8192
_MAX_PIXELS = 60_000
_ATTEMPTS = 8
_BF16, _TWO_THREADS = 0.15, 0.3
_DTYPES = (("float32", "bfloat16", "float16"), (10, 1, 1))
# Share of programs in which operators of small sizes follow the blocks.
_SMALL_OPERATORS = 0.35


def generate_real(seed: int, index: int) -> Program:
    """Model ``index`` of a seed: the same in every process, independent of what ran before."""
    rng = random.Random(f"{seed}:{index}:real")
    while True:
        program = _write(rng, _drawn_mode(rng), rng.randrange(1 << 30))
        if program is not None:
            return program


def _drawn_mode(rng: random.Random) -> Mode:
    mode = draw_mode(rng)
    batch, length, side = rng.choice(BATCHES), rng.choice(LENGTHS), rng.choice(SPATIAL)
    while batch * length > _MAX_ROWS or batch * side * side > _MAX_PIXELS or len({batch, length, side}) < 3:
        batch, length, side = rng.choice(BATCHES), rng.choice(LENGTHS), rng.choice(SPATIAL)
    first = {"B": batch, "S": length, "W": side}
    second = first
    if mode.sizes[0] != mode.sizes[1]:
        second = {"B": batch + rng.choice([0, 0, 1, 2]), "S": length + rng.choice([0, 1, 1, 3, 16]),
                  "W": side + rng.choice([0, 0, 2, 16])}  # fmt: skip
    steps = mode.steps.replace("X", "").replace("WAB", "") if rng.random() < 0.8 else mode.steps.replace("X", "")
    if first == second:
        steps = steps.replace("C", "").replace("D", "")
    return replace(
        mode, sizes=(first, second), steps=steps, real_sizes=True, train=mode.train and rng.random() < 0.3,
        grad=mode.grad if rng.random() < 0.6 else "no_grad", options=mode.options if rng.random() < 0.6 else {},
        precision="bf16" if rng.random() < _BF16 else "f32", threads=2 if rng.random() < _TWO_THREADS else 1,
    )  # fmt: skip


def _write(rng: random.Random, mode: Mode, seed: int) -> Program | None:
    torch.manual_seed(seed)
    g = RealContext(rng, mode, seed, rng.choices(*_DTYPES)[0])
    count = rng.choice([1, 1, 2, 2, 3, 5])
    done = 0
    for _ in range(count * _ATTEMPTS):
        if done == count:
            break
        done += _added(g, _next_block(g, rng))
    if not done:
        return None
    if rng.random() < _SMALL_OPERATORS:
        _add_operators(g, rng)
    return finished(g, rng, mode, seed, every=True).without_unused_constants()


def _next_block(g: RealContext, rng: random.Random) -> str:
    """A block that continues the last value, mostly."""
    last = family(g.values[-1]) if g.values else ""
    fits = [name for name, entry in BLOCKS.items() if entry.takes == last] if rng.random() < 0.6 else []
    names = fits or list(BLOCKS)
    return rng.choices(names, [BLOCKS[name].weight for name in names])[0]


def _added(g: RealContext, name: str) -> bool:
    mark = g.mark()
    g.block = name
    g.infinite = False
    try:
        BLOCKS[name].build(g)
    except Skip:
        g.undo(mark)
        return False
    g.infinite = False
    return True


def _suits_real_sizes(entry: Entry) -> bool:
    # Some of many values always lies halfway between two bytes; loops over rows are unrolled.
    return entry.build.__module__ != "fuzzing.ops_quantized" and entry.name not in {"recurrent", "python_loop"}


def _add_operators(g: RealContext, rng: random.Random) -> None:
    entries = [entry for entry in ENTRIES.values() if _suits_real_sizes(entry)]
    names, weights = [entry.name for entry in entries], [entry.weight for entry in entries]
    for _ in range(rng.choice([4, 8, 16])):
        name = rng.choices(names, weights)[0]
        mark = g.mark()
        try:
            g.add(name, ENTRIES[name].build(g))
        except Skip:
            g.undo(mark)
