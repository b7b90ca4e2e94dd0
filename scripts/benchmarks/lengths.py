"""Measures how a worker's memory grows with the lengths that one symbolic graph is called with, and what calls cost.

    python scripts/benchmarks/lengths.py
    python scripts/benchmarks/lengths.py --calls 1000 --capacities 1000,100,10 --layers 6 --width 384

OpenVINO's CPU plugin keeps the kernels that it builds for each size. Each contender is a value of
``CPU_RUNTIME_CACHE_CAPACITY`` in its own process: 5000 is OpenVINO's default, 100 ours. Lengths are random; the longest
comes first, so that larger activations cause no growth. Finally calls with eight lengths, then with all, are timed.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer
from rich.progress import track
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torchserve_openvino as tov
from benchmarks import output
from benchmarks.harness import seconds

_FEW = range(8, 40, 4)
_TIMED = 150


def _megabytes() -> int:
    """Resident memory of this process, after the allocator has returned its free pages."""
    ctypes.CDLL(None).malloc_trim(0)
    return round(psutil.Process().memory_info().rss / 1e6)


def _milliseconds(call: Callable[[int], object], lengths: Sequence[int]) -> float:
    """Median time of a call with a random length out of ``lengths``."""
    drawn = random.Random(0).choices(lengths, k=_TIMED)
    return statistics.median(seconds(functools.partial(call, length)) for length in drawn) * 1e3


def measure(capacity: int, calls: int, longest: int, layers: int, width: int) -> tuple[list[int], float, float]:
    """Returns megabytes after warmup and after each quarter of the calls, and milliseconds with few and all lengths."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    compiled = tov.compile(model, dynamic=True, options={"config": {"CPU_RUNTIME_CACHE_CAPACITY": capacity}})

    def call(length: int) -> object:
        return compiled(torch.randn(1, length, width))

    lengths = range(3, longest + 1)
    with torch.inference_mode():
        call(longest)
        call(lengths[0])
        grown = [_megabytes()]
        for position, length in enumerate(random.Random(0).choices(lengths, k=calls), 1):
            call(length)
            if position % (calls // 4) == 0:
                grown.append(_megabytes())
        return grown, _milliseconds(call, _FEW), _milliseconds(call, lengths)


def main(
    calls: Annotated[int, typer.Option(help="Each of a random length; rounded down to fours.", min=4)] = 1000,
    longest: Annotated[int, typer.Option(help="Lengths go from 3 to this.", min=40)] = 512,
    capacities: Annotated[str, typer.Option(help="Contenders, by comma.")] = "1000,100,10",
    layers: Annotated[int, typer.Option(help="Of the encoder.")] = 6,
    width: Annotated[int, typer.Option(help="Of the encoder.")] = 384,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
) -> None:
    """Measures memory and time by the number of kernels that OpenVINO keeps.

    Examples: lengths.py; lengths.py --calls 400 --capacities 5000,100 --layers 1 --width 64
    """
    calls -= calls % 4
    cells, figures = [], []
    context = multiprocessing.get_context("spawn")
    sizes = [int(capacity) for capacity in capacities.split(",")]
    for capacity in track(sizes, "contenders", console=output.progress, disable=not sys.stderr.isatty()):
        with ProcessPoolExecutor(1, mp_context=context) as own_process:
            arguments = (capacity, calls, longest, layers, width)
            grown, few, any_length = own_process.submit(measure, *arguments).result()
        cells.append((str(capacity), *map(str, grown), f"{few:.2f}", f"{any_length:.2f}"))
        figures.append({"capacity": capacity, "megabytes": grown, "few_ms": few, "any_ms": any_length})
    columns = ("kernels kept", "MB", "1/4", "2/4", "3/4", "all calls", "ms, 8 lengths", "ms, any length")
    output.results().print(output.table("", columns, cells, left=0))
    output.write_json(json_path, {"contenders": figures})


if __name__ == "__main__":
    typer.run(main)
