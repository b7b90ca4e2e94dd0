"""What one symbolic graph keeps in memory for each length that it was called with, and what a length costs again.

    python scripts/benchmark_lengths.py
    python scripts/benchmark_lengths.py --lengths 1200 --capacities 5000,1000,100 --layers 6 --width 384

OpenVINO's CPU plugin keeps the kernels that it made for a size. Each contender is a ``CPU_RUNTIME_CACHE_CAPACITY`` in a
process of its own: 5000 is OpenVINO's default, 1000 ours. First each length is called once, then some at random.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated

import psutil
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import torchserve_openvino as tov


def _megabytes() -> float:
    """Resident memory of this process, without what the allocator only keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss / 1e6


def measure(capacity: int, lengths: int, layers: int, width: int, calls: int) -> tuple[float, float]:
    """Megabytes for all lengths together, and the median milliseconds of a call with one of them."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    compiled = tov.compile(model, dynamic=True, options={"config": {"CPU_RUNTIME_CACHE_CAPACITY": capacity}})
    seconds = []
    with torch.inference_mode():
        compiled(torch.randn(1, 3, width))
        before = _megabytes()
        for length in range(2, lengths + 2):
            compiled(torch.randn(1, length, width))
        kept = _megabytes() - before
        for length in random.Random(0).choices(range(2, lengths + 2), k=calls):
            x = torch.randn(1, length, width)
            start = time.perf_counter()
            compiled(x)
            seconds.append(time.perf_counter() - start)
    return kept, statistics.median(seconds) * 1e3


def main(
    lengths: Annotated[int, typer.Option(help="How many, from 2 on.")] = 400,
    capacities: Annotated[str, typer.Option(help="Contenders, by comma.")] = "5000,1000,100",
    layers: Annotated[int, typer.Option(help="Of the encoder.")] = 1,
    width: Annotated[int, typer.Option(help="Of the encoder.")] = 64,
    calls: Annotated[int, typer.Option(help="Timed, with lengths at random.")] = 300,
) -> None:
    """Measures memory and time by the number of kernels that OpenVINO keeps.

    Examples: benchmark_lengths.py; benchmark_lengths.py --lengths 1200 --capacities 5000,100
    """
    console = Console()
    table = Table("kernels kept", "MB for all lengths", "MB for one", "ms for a call")
    context = multiprocessing.get_context("spawn")
    chosen = [int(each) for each in capacities.split(",")]
    for capacity in track(chosen, "contenders", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        with ProcessPoolExecutor(1, mp_context=context) as own_process:
            kept, call = own_process.submit(measure, capacity, lengths, layers, width, calls).result()
        table.add_row(str(capacity), f"{kept:.0f}", f"{kept / lengths:.2f}", f"{call:.2f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
