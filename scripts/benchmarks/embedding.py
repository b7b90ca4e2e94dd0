"""Compares servers of sentence embeddings: TorchServe with eager PyTorch, plain and tuned, and with this package.

The model is all-MiniLM-L6-v2; texts have 4 to 60 words. Each server is started on free loopback ports, answers every
text as eager PyTorch does, gets the load from a client in a process of its own, and is stopped before the next one
starts. The client shares the machine with the servers; quote the ratios. Needs the extras `examples` and `hf`, and
`pip install aiohttp`.

    python scripts/benchmarks/embedding.py
    python scripts/benchmarks/embedding.py --only eager-tuned,ours --clients 16 --seconds 10 --json embedding.json
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.servers import exit_on_signals
from benchmarks.servers.embedders import CONTENDERS, pack, served, vectors
from benchmarks.task_cases import minilm, text_of


def main(
    only: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(CONTENDERS)}")] = ",".join(CONTENDERS),
    clients: Annotated[str, typer.Option(help="Numbers of clients by comma.")] = "1,16",
    seconds: Annotated[float, typer.Option(help="Of each load.", min=0.5)] = 8.0,
    rounds: Annotated[int, typer.Option(help="How often all take turns.", min=1)] = 2,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Measures servers of sentence embeddings."""
    exit_on_signals()
    warnings.filterwarnings("ignore")
    names = output.chosen(only, CONTENDERS, "--only")
    levels = [int(one) for one in clients.split(",")]
    folder, draw = minilm(), random.Random(0)
    texts = [text_of(draw.randint(4, 60), seed) for seed in range(64)]
    expected = vectors(folder, texts)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="tsov-bench-") as root:
        work = Path(root)
        requests = []
        for number, text in enumerate(texts):
            path = work / f"{number}.json"
            path.write_text(json.dumps({"inputs": text}), "utf-8")
            # The client compares the position of the largest number.
            requests.append((str(path), str(int(expected[number].argmax()))))
        for name in names:
            pack(name, folder, work)
        for turn in range(rounds):
            for name in names:
                output.progress.print(f"round {turn + 1}/{rounds}, {name}", highlight=False)
                runs[name] += served(name, work, requests, texts, expected, levels, seconds)
    out = output.results()
    columns = ["server", "clients", "requests/s", "x", "p50 ms", "p99 ms", "cosine", "wrong", "failed"]
    cells = []
    for level in levels:
        rates = {name: _median(runs[name], level, "rate") for name in names}
        for name in names:
            rows = [row for row in runs[name] if row["clients"] == level]
            cells.append(
                (
                    name, str(level), f"{rates[name]:.1f}", f"{rates[name] / rates[names[0]]:.2f}",
                    f"{_median(runs[name], level, 'p50'):.1f}", f"{_median(runs[name], level, 'p99'):.1f}",
                    f"{min(row['cosine'] for row in rows):.5f}", str(sum(row["wrong"] for row in rows)),
                    str(sum(sum(row["failed"].values()) for row in rows)),
                )
            )  # fmt: skip
    out.print(output.table(f"all-MiniLM-L6-v2, {seconds:g} s each, medians of {rounds} rounds", columns, cells, left=1))
    output.write_json(json_path, {"results": runs})


def _median(rows: list[dict[str, Any]], level: int, key: str) -> float:
    return statistics.median(row[key] for row in rows if row["clients"] == level)


if __name__ == "__main__":
    typer.run(main)
