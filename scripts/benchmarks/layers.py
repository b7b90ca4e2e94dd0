"""Times layers that other backends leave to eager PyTorch (recurrent, embedding bags, spectra): ours against eager.

    python scripts/benchmarks/layers.py
    python scripts/benchmarks/layers.py --only lstm,gru --rounds 30 --threads 1 --json layers.json

Each layer runs in eager PyTorch and as a frozen compiled model, interleaved; each line gives the medians, the ratio and
the coverage. Measure on an idle machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torchserve_openvino as tov
from benchmarks import output
from benchmarks.harness import enough_repeats, interleave

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
    """An embedding, two bidirectional recurrent layers, and a head."""

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
    "lstm-batch8": lambda: (nn.LSTM(128, 256, batch_first=True), (torch.randn(8, 64, 128),)),
    "gru": lambda: (nn.GRU(128, 256, batch_first=True), (torch.randn(1, 64, 128),)),
    "gru-batch8": lambda: (nn.GRU(128, 256, batch_first=True), (torch.randn(8, 64, 128),)),
    "rnn": lambda: (nn.RNN(128, 256, batch_first=True), (torch.randn(1, 64, 128),)),
    "lstm-projected": lambda: (nn.LSTM(128, 256, proj_size=64, batch_first=True), (torch.randn(1, 64, 128),)),
    "lstm-tagger": lambda: (Tagger(nn.LSTM), (tokens(1, 64),)),
    "gru-tagger": lambda: (Tagger(nn.GRU), (tokens(1, 64),)),
    "bags-sum": lambda: (nn.EmbeddingBag(VOCABULARY, 128, mode="sum"), (tokens(256, 40),)),
    "bags-mean": lambda: (nn.EmbeddingBag(VOCABULARY, 128, mode="mean"), (tokens(10_240), torch.arange(256) * 40)),
    "bags-max": lambda: (nn.EmbeddingBag(VOCABULARY, 128, mode="max"), (tokens(256, 40),)),
    "log-mel-400": lambda: (FrontEnd(400), (torch.randn(1, 16_000),)),
    "log-mel-512": lambda: (FrontEnd(512), (torch.randn(1, 16_000),)),
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


def measure(name: str, rounds: int, threads: int) -> Timing:
    torch._dynamo.reset()
    model, args = LAYERS[name]()
    model.eval()
    compiled = tov.compile(model, options={"config": {"INFERENCE_NUM_THREADS": threads}}).freeze()
    calls = {"eager": lambda: model(*args), "openvino": lambda: compiled(*args)}
    with torch.inference_mode():
        interleave(calls, 3)
        times = interleave(calls, rounds, repeats=enough_repeats(calls))
    ratio = times.ratio("eager", "openvino") or 0.0
    return Timing(name, times.median("eager"), times.median("openvino"), ratio, compiled.report.summary.coverage)


def main(
    only: Annotated[str, typer.Option(help="Names that begin with one of these, separated by commas.")] = "",
    rounds: Annotated[int, typer.Option(help="Turns of each layer.")] = 20,
    threads: Annotated[int, typer.Option(help="Of both.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
) -> None:
    """Times layers in eager PyTorch and on OpenVINO, interleaved."""
    torch.set_num_threads(threads)
    names = output.chosen_by_prefix(only, LAYERS, "--only")
    timings = [measure(name, rounds, threads) for name in track(names, console=output.progress)]
    cells = [(t.layer, f"{t.eager:.3f}", f"{t.openvino:.3f}", f"{t.ratio:.2f}", f"{t.coverage:.0%}") for t in timings]
    columns = ("layer", "eager ms", "OpenVINO ms", "times faster", "coverage")
    output.results().print(output.table("", columns, cells))
    output.write_json(json_path, {"layers": [asdict(timing) for timing in timings]})


if __name__ == "__main__":
    typer.run(main)
