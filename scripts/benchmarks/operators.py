"""Times single operators at a real size on OpenVINO against eager PyTorch, to find those whose kernel is slow.

    python scripts/benchmarks/operators.py
    python scripts/benchmarks/operators.py --only cumsum,topk --turns 15 --threads 2 --json operators.json

Each operator is a frozen model of its own; both run in turns. The ratio is of the shortest times, which a busy machine
disturbs least. Tensors have a million elements unless the name has another size.
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
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torchserve_openvino as tov
from benchmarks import output
from benchmarks.harness import interleave

ROWS, COLUMNS = 1024, 1000


def matrix() -> Tensor:
    return torch.randn(ROWS, COLUMNS)


def image() -> Tensor:
    return torch.randn(1, 64, 125, 125)


def whole() -> Tensor:
    return torch.randint(-100, 100, (ROWS, COLUMNS))


X = (matrix,)
IMAGE = (image,)
WHOLE = (whole,)


def _index(length: int, most: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, most, (length,))


def _places() -> Tensor:
    return torch.randint(0, ROWS, (ROWS, COLUMNS))


# Name -> the operator, and what makes its inputs.
OPERATORS: dict[str, tuple[Callable[..., Any], tuple[Callable[[], Tensor], ...]]] = {
    "add": (lambda x: x + 1.5, X), "exp": (torch.exp, X), "erf": (torch.erf, X), "gelu": (F.gelu, X),
    "sin": (torch.sin, X), "atan2": (lambda x: torch.atan2(x, x + 1), X), "tanh": (torch.tanh, X),
    "pow": (lambda x: x.abs().pow(1.7), X), "log1p": (lambda x: torch.log1p(x.abs()), X),
    "fmod": (lambda x: torch.fmod(x, 0.3), X), "floor_divide": (lambda x: x // 0.3, X),
    "where": (lambda x: torch.where(x > 0, x, -1.0), X), "isnan": (torch.isnan, X), "nan_to_num": (torch.nan_to_num, X),
    "cumsum last": (lambda x: x.cumsum(-1), X), "cumsum first": (lambda x: x.cumsum(0), X),
    "cumprod": (lambda x: x.sigmoid().cumprod(-1), X), "cummax": (lambda x: x.cummax(-1)[0], X),
    "sum last": (lambda x: x.sum(-1), X), "sum first": (lambda x: x.sum(0), X), "sum all": (lambda x: x.sum() * 2, X),
    "mean": (lambda x: x.mean(-1), X), "var": (lambda x: x.var(-1), X), "amax first": (lambda x: x.amax(0), X),
    "prod": (lambda x: x.prod(-1), X), "norm": (lambda x: x.norm(dim=-1), X),
    "logsumexp": (lambda x: x.logsumexp(0), X),
    "any": (lambda x: (x > 3).any(-1), X), "all first": (lambda x: (x > -3).all(0), X),
    "argmax last": (lambda x: x.argmax(-1), X), "argmax first": (lambda x: x.argmax(0), X),
    "sort": (lambda x: x.sort(-1)[0], X), "argsort": (lambda x: x.argsort(-1), X),
    "topk 10": (lambda x: x.topk(10)[0], X), "topk 500": (lambda x: x.topk(500)[0], X),
    "softmax last": (lambda x: x.softmax(-1), X), "softmax first": (lambda x: x.softmax(0), X),
    "log_softmax": (lambda x: x.log_softmax(-1), X),
    "layer_norm": (nn.LayerNorm(COLUMNS), X), "group_norm": (nn.GroupNorm(8, 64), IMAGE),
    "instance_norm": (nn.InstanceNorm2d(64), IMAGE), "batch_norm": (nn.BatchNorm2d(64), IMAGE),
    "transpose": (lambda x: x.t().contiguous(), X),
    "transpose 1024": (lambda x: x.t().contiguous(), (lambda: torch.randn(1024, 1024),)),
    "permute heads": (lambda x: x.permute(0, 2, 1, 3).contiguous(), (lambda: torch.randn(8, 128, 16, 64),)),
    "permute to last": (lambda x: x.permute(0, 2, 3, 1).contiguous(), IMAGE),
    "roll": (lambda x: x.roll(7, 1), X), "flip": (lambda x: x.flip(1), X), "repeat": (lambda x: x.repeat(1, 2), X),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), X), "cat": (lambda x: torch.cat([x, x], 1), X),
    "stack last": (lambda x: torch.stack([x, x], -1), X), "strided": (lambda x: x[:, ::2] * 1, X),
    "triu": (torch.triu, X), "expand": (lambda x: x[:, :, None].expand(-1, -1, 4).contiguous(), X),
    "gather": (lambda x, i: x.gather(0, i), (matrix, _places)),
    "gather last": (lambda x, i: x.gather(1, i % COLUMNS), (matrix, _places)),
    "index_select first": (lambda x, i: x.index_select(0, i), (matrix, _index(ROWS, ROWS))),
    "index_select last": (lambda x, i: x.index_select(1, i), (matrix, _index(COLUMNS, COLUMNS))),
    "index two": (lambda x, i: x[i, i % COLUMNS], (matrix, _index(100_000, ROWS))),
    "embedding": (lambda x, i: F.embedding(i, x), (matrix, _index(2048, ROWS))),
    "one_hot": (lambda i: F.one_hot(i, 1000), (_index(1000, 1000),)),
    "scatter": (lambda x, i: x.scatter(0, i, 1.0), (matrix, _places)),
    "scatter_add": (lambda x, i: torch.zeros_like(x).scatter_add(0, i, x), (matrix, _places)),
    "index_add": (lambda x, i: torch.zeros_like(x).index_add(0, i, x), (matrix, _index(ROWS, ROWS))),
    "index_put": (lambda x, i: x.index_put((i,), x), (matrix, lambda: torch.randperm(ROWS))),
    "masked_fill": (lambda x: x.masked_fill(x > 1, 0.0), X),
    "searchsorted": (lambda x: torch.searchsorted(torch.arange(0, 1, 0.01), x), X),
    "pad zero": (lambda x: F.pad(x, (3, 3)), X), "pad reflect": (lambda x: F.pad(x, (3, 3, 3, 3), "reflect"), IMAGE),
    "pad circular": (lambda x: F.pad(x, (3, 3, 3, 3), "circular"), IMAGE),
    "pad replicate": (lambda x: F.pad(x, (3, 3, 3, 3), "replicate"), IMAGE),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), IMAGE),
    "unfold": (lambda x: F.unfold(x, 3), (lambda: torch.randn(1, 16, 80, 80),)),
    "grid_sample": (
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        (image, lambda: torch.rand(1, 125, 125, 2) * 2 - 1),
    ),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), IMAGE),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2.0), IMAGE),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic"), IMAGE),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), IMAGE), "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGE),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 7), IMAGE),
    "depthwise": (nn.Conv2d(64, 64, 3, padding=1, groups=64), IMAGE), "conv2d": (nn.Conv2d(64, 64, 3), IMAGE),
    "conv_transpose2d": (nn.ConvTranspose2d(64, 32, 2, 2), IMAGE),
    "conv1d": (nn.Conv1d(64, 64, 5), (lambda: torch.randn(1, 64, 16_000),)),
    "matmul": (lambda x: x @ x.t(), X), "bmm": (lambda x: x @ x.mT, (lambda: torch.randn(64, 128, 128),)),
    "cdist": (lambda x: torch.cdist(x, x), (lambda: torch.randn(1000, 64),)),
    "lstm": (lambda *x: _LSTM(*x)[0], (lambda: torch.randn(8, 128, 128),)),
    "gru": (lambda *x: _GRU(*x)[0], (lambda: torch.randn(8, 128, 128),)),
    "integer add": (lambda x: x + 3, WHOLE), "integer mul": (lambda x: x * 3, WHOLE),
    "integer divide": (lambda x: x // 3, WHOLE), "remainder": (lambda x: x % 7, WHOLE),
    "integer sum": (lambda x: x.sum(-1), WHOLE), "cast": (lambda x: x.float(), WHOLE), "eq": (lambda x: x == 3, WHOLE),
}  # fmt: skip
_LSTM, _GRU = (kind(128, 128, batch_first=True).eval() for kind in (nn.LSTM, nn.GRU))


@dataclass
class Timing:
    """Shortest times in milliseconds."""

    operator: str
    eager: float
    openvino: float
    ratio: float
    coverage: float


def measure(name: str, turns: int, threads: int) -> Timing:
    torch._dynamo.reset()
    torch.manual_seed(0)
    operator, makers = OPERATORS[name]
    if isinstance(operator, nn.Module):
        operator.eval()
    args = [make() for make in makers]
    options = {"config": {"INFERENCE_NUM_THREADS": threads}, "min_partition_us": 0}
    compiled = tov.compile(operator, options=options).freeze()
    calls = {"eager": lambda: operator(*args), "openvino": lambda: compiled(*args)}
    with torch.inference_mode():
        interleave(calls, 2)
        times = interleave(calls, turns).milliseconds
    eager, openvino = (min(times[contender]) for contender in ("eager", "openvino"))
    return Timing(name, eager, openvino, openvino / eager, compiled.report.summary.coverage)


def main(
    only: Annotated[str, typer.Option(help="Names that begin with one of these, separated by commas.")] = "",
    turns: Annotated[int, typer.Option(help="Turns of each operator.")] = 9,
    threads: Annotated[int, typer.Option(help="Threads of both.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
) -> None:
    """Times single operators on OpenVINO against eager PyTorch; the slowest come first.

    Example: operators.py --only cumsum,sort --turns 15
    """
    torch.set_num_threads(threads)
    names = output.chosen_by_prefix(only, OPERATORS, "--only")
    timings = [measure(name, turns, threads) for name in track(names, console=output.progress)]
    timings.sort(key=lambda timing: -timing.ratio)
    cells = [
        (t.operator, f"{t.eager:.3f}", f"{t.openvino:.3f}", f"{t.ratio:.2f}", f"{t.coverage:.0%}") for t in timings
    ]
    columns = ("operator", "eager ms", "OpenVINO ms", "times slower", "coverage")
    output.results().print(output.table("", columns, cells))
    output.write_json(json_path, {"operators": [asdict(timing) for timing in timings]})


if __name__ == "__main__":
    typer.run(main)
