"""Measures from which size on a piece of a graph is worth the way into OpenVINO: the figure behind min_partition_us.

    python scripts/benchmark_partitions.py
    python scripts/benchmark_partitions.py --rounds 15 --json pieces.json

Each piece is a chain of light operators over some number of elements. It runs as a partition of ours and as the same
graph in eager PyTorch, in turns; a line says what each takes, what backend/worthwhile.py estimates for eager, and who
is faster. The break-even is the estimate at which most larger pieces gain and most smaller ones lose.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import torchserve_openvino as tov
from torchserve_openvino.backend.probes import Observation, Probes
from torchserve_openvino.backend.worthwhile import PIECE_US, eager_us

SIZES = (16, 1_000, 10_000, 100_000, 1_000_000)
CHAINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": lambda x: x.relu(),
    "add, mul": lambda x: (x + 1.5) * 2.5,
    "add, mul, sub, relu": lambda x: ((x + 1.5) * 2.5 - x).relu(),
    "exp, sigmoid": lambda x: x.exp().sigmoid(),
    "8 x arithmetic": lambda x: ((((x + 1) * x - 2) * x + 3) * x - 4).clamp(-9, 9).abs(),
    "sum": lambda x: x.sum(0),
}
# A call is too short to be timed by itself.
CALL_SECONDS = 0.02


@dataclass
class Piece:
    """Medians in microseconds."""

    chain: str
    elements: int
    estimate: float
    openvino: float
    eager: float


def piece(chain: str, elements: int, rounds: int) -> Piece:
    torch._dynamo.reset()
    seen: list[Observation] = []
    compiled = tov.compile(CHAINS[chain], probes=Probes(observe=seen.append))
    x = torch.rand(elements)
    with torch.inference_mode():
        compiled(x)
        (observation,) = seen
        (part,) = observation.partitioned.parts
        partition, eager = observation.calls[part.name], part.graph.forward
        calls: dict[str, Callable[[], Any]] = {"openvino": lambda: partition(x), "eager": lambda: eager(x)}
        times: dict[str, list[float]] = {name: [] for name in calls}
        repeats = {name: max(1, int(CALL_SECONDS / _time(call, 3))) for name, call in calls.items()}
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(_time(call, repeats[name]) * 1e6)
    estimate = eager_us([node for node in part.graph.graph.nodes if node.op == "call_function"])
    assert estimate is not None
    return Piece(chain, elements, estimate, *(statistics.median(times[name]) for name in ("openvino", "eager")))


def _time(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def break_even(pieces: list[Piece]) -> float:
    """The estimate, in microseconds, that parts winners from losers with the fewest pieces on the wrong side."""
    candidates = [0.0, *sorted({p.estimate for p in pieces}), max(p.estimate for p in pieces) + 1]
    return min(candidates, key=lambda least: sum((p.openvino < p.eager) != (p.estimate >= least) for p in pieces))


def main(
    rounds: Annotated[int, typer.Option(help="Times of each piece, in turns; medians are printed.", min=1)] = 9,
    threads: Annotated[int, typer.Option(help="Torch's threads; 0 leaves torch's own number.", min=0)] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measure which pieces of a graph gain by OpenVINO."""
    if threads:
        torch.set_num_threads(threads)
    todo = [(chain, size) for chain in CHAINS for size in SIZES]
    progress = track(todo, "pieces", console=Console(stderr=True), transient=True)
    pieces = [piece(chain, size, rounds) for chain, size in progress]
    table = Table("operators", "elements", "estimate us", "OpenVINO us", "eager us", "eager / OpenVINO")
    for p in pieces:
        cells = (f"{p.elements:,}", f"{p.estimate:.1f}", f"{p.openvino:.1f}", f"{p.eager:.1f}")
        table.add_row(p.chain, *cells, f"{p.eager / p.openvino:.2f}")
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    console.print(table)
    least = break_even(pieces)
    console.print(f"break-even at an estimate of {least:.0f} us (the default of min_partition_us is {PIECE_US:.0f})")
    if json_path is not None:
        json_path.write_text(json.dumps({"break_even_us": least, "pieces": [asdict(p) for p in pieces]}, indent=1))


if __name__ == "__main__":
    typer.run(main)
