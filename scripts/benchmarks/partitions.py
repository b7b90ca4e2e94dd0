"""Measures the size from which a piece of a graph pays off on OpenVINO: the figure behind min_partition_us.

    python scripts/benchmarks/partitions.py
    python scripts/benchmarks/partitions.py --rounds 15 --json pieces.json

Each piece is a chain of cheap operators over a number of elements. It runs as an OpenVINO partition and as the same
graph in eager PyTorch, interleaved; each line gives both times, the estimate of backend/partitioning/partition.py for
eager, and the ratio. The break-even is the estimate above which most pieces gain and below which most lose.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.harness import Call, enough_repeats, interleave
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.instrumentation import Instrumentation, Observation
from torchserve_openvino.backend.partitioning.partition import PIECE_US, eager_us

SIZES = (16, 1_000, 10_000, 100_000, 1_000_000)
CHAINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": lambda x: x.relu(),
    "add, mul": lambda x: (x + 1.5) * 2.5,
    "add, mul, sub, relu": lambda x: ((x + 1.5) * 2.5 - x).relu(),
    "exp, sigmoid": lambda x: x.exp().sigmoid(),
    "8 x arithmetic": lambda x: ((((x + 1) * x - 2) * x + 3) * x - 4).clamp(-9, 9).abs(),
    "sum": lambda x: x.sum(0),
}


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
    compiled = compile_with(CHAINS[chain], CompileSpec(instrumentation=Instrumentation(observe=seen.append)))
    x = torch.rand(elements)
    with torch.inference_mode():
        compiled(x)
        (observation,) = seen
        (part,) = observation.partitioned.parts
        partition, eager = observation.calls[part.name], part.graph.forward
        calls: dict[str, Call] = {"openvino": lambda: partition(x), "eager": lambda: eager(x)}
        times = interleave(calls, rounds, repeats=enough_repeats(calls))
    estimate = eager_us([node for node in part.graph.graph.nodes if node.op == "call_function"])
    assert estimate is not None
    return Piece(chain, elements, estimate, *(times.median(name) * 1e3 for name in ("openvino", "eager")))


def break_even(pieces: list[Piece]) -> float:
    """The estimate, in microseconds, that separates winners from losers with the fewest pieces on the wrong side."""
    candidates = [0.0, *sorted({p.estimate for p in pieces}), max(p.estimate for p in pieces) + 1]
    return min(candidates, key=lambda least: sum((p.openvino < p.eager) != (p.estimate >= least) for p in pieces))


def main(
    rounds: Annotated[int, typer.Option(help="Measurements of each piece; medians are printed.", min=1)] = 9,
    threads: Annotated[int, typer.Option(help="Torch's threads; 0 leaves torch's own number.", min=0)] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
) -> None:
    """Measure which pieces of a graph gain by OpenVINO."""
    if threads:
        torch.set_num_threads(threads)
    todo = [(chain, size) for chain in CHAINS for size in SIZES]
    progress = track(todo, "pieces", console=output.progress, transient=True)
    pieces = [piece(chain, size, rounds) for chain, size in progress]
    cells = [
        (p.chain, f"{p.elements:,}", f"{p.estimate:.1f}", f"{p.openvino:.1f}", f"{p.eager:.1f}",
         f"{p.eager / p.openvino:.2f}")
        for p in pieces
    ]  # fmt: skip
    columns = ("operators", "elements", "estimate us", "OpenVINO us", "eager us", "eager / OpenVINO")
    out, least = output.results(), break_even(pieces)
    out.print(output.table("", columns, cells))
    out.print(f"break-even at an estimate of {least:.0f} us (the default of min_partition_us is {PIECE_US:.0f})")
    output.write_json(json_path, {"break_even_us": least, "pieces": [asdict(p) for p in pieces]})


if __name__ == "__main__":
    typer.run(main)
