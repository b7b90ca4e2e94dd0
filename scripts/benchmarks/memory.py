"""Measures a worker's memory: one and several compiled batch sizes, cold and from a warm cache; and raw OpenVINO's.

    python scripts/benchmarks/memory.py
    python scripts/benchmarks/memory.py --buckets 1,2,4,8,16 --length 64 --json memory.json
    python scripts/benchmarks/memory.py --only ours-one,ours-all,each-all --speed

Each contender is a process of its own: it loads a random BERT (144 MB of weights), compiles, answers a request of each
batch size, frees what it can (`malloc_trim`), and reports its resident memory. `ours` is the tensor handler as a worker
loads it; `each` and `shared` are the same with `batching.one_graph: false` and `true`; `raw` is an OpenVINO program
that converted the model and dropped the PyTorch one. --speed also times one graph for all batch sizes against one graph
per size, interleaved. Needs the extra `hf`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.harness import interleave

# Maps a contender to whether it compiles all batch sizes, and to its `batching.one_graph`.
OURS = {
    "ours-one": (False, "auto"),
    "ours-all": (True, "auto"),
    "ours-one-warm": (False, "auto"),
    "ours-all-warm": (True, "auto"),
    "shared-all": (True, True),
    "each-all": (True, False),
    "each-all-warm": (True, False),
}
RAW = {"raw-one": False, "raw-all": True}
NAMES = (*RAW, *OURS)


class Pooled(torch.nn.Module):
    """Returns one vector per item, to keep answers small."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask).pooler_output


def bert() -> torch.nn.Module:
    """144 MB of weights, the same in each process."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20_000, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048
    )
    return Pooled(BertModel(config)).eval()


def resident() -> dict[str, float]:
    """Returns MB: all resident memory, and the part not backed by files."""
    import psutil

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    info = psutil.Process().memory_info()
    return {"rss": info.rss / 1e6, "anonymous": (info.rss - info.shared) / 1e6}


# --- in a process of its own ---------------------------------------------------------------------------------------


def raw(buckets: list[int], length: int) -> Any:
    """Makes and runs an infer request for each batch size, as an OpenVINO program does."""
    import openvino as ov

    model, ids = bert(), torch.ones(2, length, dtype=torch.long)
    batch = {0: torch.export.Dim.DYNAMIC}
    converted = ov.convert_model(torch.export.export(model, (ids, ids), dynamic_shapes=(batch, batch), strict=False))
    del model
    core, requests = ov.Core(), {}
    for size in buckets:
        fixed = converted.clone()
        fixed.reshape({port.any_name: [size, length] for port in fixed.inputs})
        compiled = core.compile_model(fixed, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        requests[size] = compiled.create_infer_request()
    del converted, fixed
    for size, request in requests.items():
        values = torch.ones(size, length, dtype=torch.long).numpy()
        request.infer([values, values])
    return requests


def handler(buckets: list[int], length: int, one_graph: bool | str, cache: Path | None) -> Any:
    """The tensor handler on a random BERT, initialized as by TorchServe's worker and called at each batch size."""
    from benchmarks.workers import context_for, expect
    from torchserve_openvino.entrypoints.tensor import OpenVINOTensorHandler

    class Entry(OpenVINOTensorHandler):
        def _load_pickled_model(self, *_: Any) -> torch.nn.Module:
            return bert()

    inputs = [
        {"name": "input_ids", "shape": [length], "dtype": "int64", "low": 0, "high": 20_000},
        {"name": "attention_mask", "shape": [length], "dtype": "int64", "mask": True},
    ]
    options = {"model_caching": cache is not None} | ({"cache_dir": str(cache)} if cache is not None else {})
    settings = {
        "batchSize": buckets[-1],
        "maxBatchDelay": 10,
        "pt2": {"compile": {"backend": "openvino", "options": options}},
        "handler": {
            "openvino": {
                "warmup": {"inputs": inputs},
                "batching": {"buckets": buckets, "one_graph": one_graph},
            }
        },
    }
    entry = Entry()
    with tempfile.TemporaryDirectory(prefix="tsov-memory-") as folder:
        context = context_for(Path(folder), settings)
        entry.initialize(context)
        entry.context = context
        for size in buckets:
            item = {"inputs": {"input_ids": [[1] * length], "attention_mask": [[1] * length]}}
            expect(context, size)
            answers = entry.handle([{"body": item}] * size, context)
            assert len(answers[0][0]) == 512, answers
    return entry


def child(name: str, buckets: list[int], length: int, cache: str) -> None:
    """Measures one contender, and prints its figures as JSON."""
    if name in RAW:
        kept = raw(buckets if RAW[name] else buckets[:1], length)
        facts: dict[str, Any] = {}
    else:
        several, one_graph = OURS[name]
        # A cold worker runs without a cache: one that fills a cache is a different case.
        kept = handler(buckets if several else buckets[:1], length, one_graph, Path(cache) if cache else None)
        summary = kept.report.summary
        facts = {"graphs": summary.graphs, "coverage": summary.coverage, "fallbacks": summary.fallbacks}
        facts["cache"] = kept.report.to_dict()["cache"]
    figures = resident()
    # Kept alive until after the measurement.
    del kept
    print(json.dumps({"contender": name, **figures, **facts}))


# --- in the parent -------------------------------------------------------------------------------------------------


def measured(name: str, buckets: list[int], length: int, cache: Path) -> dict[str, Any]:
    """Runs one contender; one with a warm cache runs twice, first to fill it."""
    warm = name.endswith("-warm")
    folder = cache / name if warm else ""
    command = [sys.executable, __file__, "--child", name, "--buckets", ",".join(map(str, buckets))]
    command += ["--length", str(length), "--cache", str(folder)]
    for _ in range(2 if warm else 1):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            output.progress.print(done.stderr[-3000:], markup=False)
            raise typer.Exit(1)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def speed(buckets: list[int], length: int, runs: int) -> Table:
    """Times one graph for all sizes against one graph per size: medians in ms, interleaved."""
    one_graph, several_graphs = (handler(buckets, length, one, None) for one in (True, False))
    cells = []
    for size in buckets:
        ids = torch.ones(size, length, dtype=torch.long)

        def call(entry: Any, ids: torch.Tensor = ids) -> Callable[[], Any]:
            return lambda: entry.model(input_ids=ids, attention_mask=ids)

        with torch.no_grad():
            times = interleave({"one": call(one_graph), "each": call(several_graphs)}, runs)
        medians = (f"{times.median(name):.2f}" for name in ("one", "each"))
        cells.append((str(size), *medians, output.number(times.ratio("one", "each"), ".3f")))
    columns = ("batch", "one graph, ms", "one for each, ms", "one / each")
    return output.table("the model's call", columns, cells, left=0)


def table(rows: list[dict[str, Any]]) -> Table:
    by_name = {row["contender"]: row["rss"] for row in rows}
    cells = []
    for row in rows:
        ratios = [f"{row['rss'] / by_name[name]:.2f}" if name in by_name else "" for name in ("ours-one", "raw-all")]
        megabytes = (f"{row['rss']:.0f}", f"{row['anonymous']:.0f}")
        cells.append((row["contender"], *megabytes, *ratios, str(row.get("graphs", ""))))
    columns = ("contender", "RSS", "anonymous", "x ours-one", "x raw-all", "graphs")
    return output.table("resident memory, MB", columns, cells)


def main(
    buckets: Annotated[str, typer.Option(help="Compiled batch sizes")] = "1,2,4,8,16",
    length: Annotated[int, typer.Option(help="Tokens of each item", min=1)] = 64,
    only: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(NAMES)}")] = ",".join(NAMES),
    with_speed: Annotated[bool, typer.Option("--speed", help="Also time one graph next to one for each size")] = False,
    runs: Annotated[int, typer.Option(help="Timed turns of --speed", min=1)] = 40,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
    child_name: Annotated[str, typer.Option("--child", hidden=True)] = "",
    cache: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    warnings.filterwarnings("ignore")
    sizes = sorted({int(size) for size in buckets.split(",")})
    if child_name:
        child(child_name, sizes, length, cache)
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="tsov-memory-") as folder:
        for name in output.chosen(only, NAMES, "--only"):
            output.progress.print(f"{name} ...")
            rows.append(measured(name, sizes, length, Path(folder)))
    out = output.results()
    out.print(table(rows))
    if with_speed:
        out.print(speed(sizes, length, runs))
    output.write_json(json_path, {"contenders": rows})


if __name__ == "__main__":
    typer.run(main)
