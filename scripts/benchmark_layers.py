"""Times layers that other backends leave in eager PyTorch: recurrent, bags, masks, spectra; ours against eager.

    python scripts/benchmark_layers.py
    python scripts/benchmark_layers.py --only lstm,gru --rounds 30 --threads 1 --json layers.json

Each layer runs in eager PyTorch and through a frozen compiled model, in turns, so that whatever else the machine does
hits both; a line says the medians, their ratio and the coverage. Trust no figure of a machine that others use.
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
from torch import Tensor, nn

import torchserve_openvino as tov

# A call is too short to be timed by itself.
CALL_SECONDS = 0.02
VOCABULARY = 20_000


class FrontEnd(nn.Module):
    """A log-mel spectrogram, as front ends of speech models compute it."""

    def __init__(self, size: int = 400) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("window", torch.hann_window(size))
        self.register_buffer("bank", torch.rand(80, size // 2 + 1))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x, self.size, 160, window=self.window, return_complex=True)
        return torch.log(self.bank @ spectrum.abs().pow(2) + 1e-6)


class Tagger(nn.Module):
    """Embedding, a recurrent layer of two directions, a head."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.before = nn.Embedding(VOCABULARY, 128)
        self.layer = layer(128, 256, 2, batch_first=True, bidirectional=True)
        self.after = nn.Linear(512, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.before(x))[0])


class FNet(nn.Module):
    """Fourier transforms in place of attention (Lee-Thorp et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real
        return y + self.feed(y)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape)


# Name -> model and its inputs.
LAYERS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "lstm": lambda: (nn.LSTM(128, 256, batch_first=True), (torch.randn(1, 64, 128),)),
    "lstm, batch 8": lambda: (nn.LSTM(128, 256, batch_first=True), (torch.randn(8, 64, 128),)),
    "gru": lambda: (nn.GRU(128, 256, batch_first=True), (torch.randn(1, 64, 128),)),
    "gru, batch 8": lambda: (nn.GRU(128, 256, batch_first=True), (torch.randn(8, 64, 128),)),
    "rnn": lambda: (nn.RNN(128, 256, batch_first=True), (torch.randn(1, 64, 128),)),
    "lstm, projected": lambda: (nn.LSTM(128, 256, proj_size=64, batch_first=True), (torch.randn(1, 64, 128),)),
    "lstm tagger": lambda: (Tagger(nn.LSTM), (tokens(1, 64),)),
    "gru tagger": lambda: (Tagger(nn.GRU), (tokens(1, 64),)),
    "bags, sum": lambda: (nn.EmbeddingBag(VOCABULARY, 128, mode="sum"), (tokens(256, 40),)),
    "bags, mean": lambda: (nn.EmbeddingBag(VOCABULARY, 128, mode="mean"), (tokens(10_240), torch.arange(256) * 40)),
    "bags, max": lambda: (nn.EmbeddingBag(VOCABULARY, 128, mode="max"), (tokens(256, 40),)),
    "log-mel, 400": lambda: (FrontEnd(400), (torch.randn(1, 16_000),)),
    "log-mel, 512": lambda: (FrontEnd(512), (torch.randn(1, 16_000),)),
    "fnet": lambda: (FNet(), (torch.randn(1, 128, 256),)),
}


@dataclass
class Timing:
    """Medians in milliseconds."""

    layer: str
    eager: float
    openvino: float
    ratio: float
    coverage: float


def _per_call(run: Callable[..., Any], args: tuple[Any, ...], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run(*args)
    return (time.perf_counter() - start) / calls


def measure(name: str, rounds: int, threads: int) -> Timing:
    torch._dynamo.reset()
    model, args = LAYERS[name]()
    model.eval()
    compiled = tov.compile(model, options={"config": {"INFERENCE_NUM_THREADS": threads}}).freeze()
    with torch.inference_mode():
        for _ in range(3):
            model(*args)
            compiled(*args)
        calls = max(1, int(CALL_SECONDS / _per_call(model, args, 3)))
        found = [(_per_call(model, args, calls), _per_call(compiled, args, calls)) for _ in range(rounds)]
    eager, ours = (statistics.median(each) * 1e3 for each in zip(*found, strict=True))
    ratio = statistics.median(a / b for a, b in found)
    return Timing(name, eager, ours, ratio, compiled.report.summary.coverage)


def main(
    only: Annotated[str, typer.Option(help="Names that begin with one of these, separated by commas.")] = "",
    rounds: Annotated[int, typer.Option(help="Turns of each layer.")] = 20,
    threads: Annotated[int, typer.Option(help="Of both.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
) -> None:
    """Times layers in eager PyTorch and on OpenVINO, in turns."""
    torch.set_num_threads(threads)
    begins = tuple(name.strip() for name in only.split(",") if name.strip())
    names = [name for name in LAYERS if not begins or name.startswith(begins)]
    timings = [measure(name, rounds, threads) for name in track(names, console=Console(stderr=True))]
    table = Table("layer", "eager ms", "OpenVINO ms", "times faster", "coverage")
    for each in timings:
        table.add_row(
            each.layer, f"{each.eager:.3f}", f"{each.openvino:.3f}", f"{each.ratio:.2f}", f"{each.coverage:.0%}"
        )
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(each) for each in timings], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
