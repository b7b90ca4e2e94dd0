"""Measures what `verify.shadow` costs requests: one worker's handler under an open load, with and without, interleaved.

    python scripts/benchmarks/shadow.py
    python scripts/benchmarks/shadow.py --share 0.01 --utilization 0.5 --blocks 20 --json shadow.json

Requests arrive as a Poisson process at a given share of the handler's capacity, whether the previous one is answered or
not. Blocks with and without the shadow alternate, with the same arrival times. The handler is the shipped
image_classifier, as in handler.py. Needs the extras `examples` and `hf`, and an idle machine.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.handler import PHOTO_MODELS
from benchmarks.harness import percentile
from benchmarks.models import MODELS
from benchmarks.workers import jpeg, started

# The handler can't keep up if a block takes more than this many times as long as its arrivals.
SATURATED = 1.1


def capacity(handler: Any, body: list[dict[str, Any]], seconds: float) -> float:
    """Requests per second when each follows the previous answer at once."""
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        handler.handle(body, handler.context)
        count += 1
    return count / (time.perf_counter() - start)


def block(handler: Any, body: list[dict[str, Any]], gaps: list[float]) -> dict[str, Any]:
    """Sends one request after each gap (seconds), and measures from its arrival."""
    latencies, busy, arrival = [], 0.0, time.perf_counter()
    start = arrival
    for gap in gaps:
        arrival += gap
        wait = arrival - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        begin = time.perf_counter()
        handler.handle(body, handler.context)
        end = time.perf_counter()
        latencies.append((end - arrival) * 1e3)
        busy += end - begin
    elapsed = time.perf_counter() - start
    return {
        "throughput": len(gaps) / elapsed,
        "busy_ms": busy / len(gaps) * 1e3,
        "late": elapsed / sum(gaps),
        "latencies": latencies,
    }


def drained(handler: Any, seconds: float = 5.0) -> None:
    """Waits until nothing is left to check: the next block must not pay for this one."""
    shadow, until = handler.served.shadow, time.monotonic() + seconds
    while shadow is not None and shadow.to_dict()["waiting"] and time.monotonic() < until:
        time.sleep(0.01)


def figures(blocks: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Throughput, time in the handler, and two percentiles of each block."""
    return [
        {
            "requests/s": one["throughput"],
            "ms in the handler": one["busy_ms"],
            "p50 ms": percentile(sorted(one["latencies"]), 0.50),
            "p99 ms": percentile(sorted(one["latencies"]), 0.99),
        }
        for one in blocks
    ]


def compared(without: list[dict[str, Any]], with_shadow: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each figure the medians over the blocks, and the median of the ratios of the pairs."""
    rows = []
    pairs = list(zip(figures(without), figures(with_shadow), strict=True))
    for name in pairs[0][0]:
        rows.append(
            {
                "figure": name,
                "without": statistics.median(a[name] for a, _ in pairs),
                "with": statistics.median(b[name] for _, b in pairs),
                "ratio": statistics.median(b[name] / a[name] for a, b in pairs),
            }
        )
    a, b = (sorted(x for one in blocks for x in one["latencies"]) for blocks in (without, with_shadow))
    low, high = percentile(a, 0.99), percentile(b, 0.99)
    rows.append({"figure": "p99 ms of all blocks", "without": low, "with": high, "ratio": high / low})
    return rows


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    cells = [(r["figure"], f"{r['without']:.2f}", f"{r['with']:.2f}", f"{r['ratio']:.4f}") for r in rows]
    return output.table(title, ("", "shadow 0", "with shadow", "ratio"), cells)


def main(
    model: Annotated[str, typer.Option(help=" or ".join(PHOTO_MODELS))] = "efficientnet-lite0",
    share: Annotated[float, typer.Option(help="verify.shadow", min=0.0, max=1.0)] = 0.01,
    budget: Annotated[float, typer.Option(help="verify.shadow_budget")] = 0.05,
    utilization: Annotated[
        float,
        typer.Option("--utilization", "--utilisation", help="Share of the handler's capacity that is sent", min=0.01),
    ] = 0.5,
    blocks: Annotated[int, typer.Option(help="Pairs of blocks", min=3)] = 12,
    requests: Annotated[int, typer.Option(help="Requests of a block", min=20)] = 500,
    seed: Annotated[int, typer.Option(help="Of the arrival times")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
) -> None:
    """Measures the price of verify.shadow."""
    if model not in PHOTO_MODELS:
        text = f"unknown: {model}; choose from {', '.join(PHOTO_MODELS)}"
        raise typer.BadParameter(text, param_hint="--model")
    warnings.filterwarnings("ignore")
    out = output.results()
    torch.manual_seed(0)
    chosen, body = MODELS[model](), [{"body": jpeg()}]
    results: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory(prefix="tsov-bench-") as folder:
        handlers = {}
        for name, value in (("without", 0.0), ("with", share)):
            archive = Path(folder) / name
            archive.mkdir()
            output.progress.print(f"{model}: preparing, shadow {value:g}")
            handlers[name] = started(chosen, archive, {"verify": {"shadow": value, "shadow_budget": budget}})
        for handler in handlers.values():
            capacity(handler, body, 1.0)
        rate = capacity(handlers["without"], body, 3.0)
        output.progress.print(f"capacity {rate:.1f} requests/s, sending {utilization * rate:.1f}/s")
        arrivals = random.Random(seed)
        for turn in range(blocks):
            gaps = [arrivals.expovariate(utilization * rate) for _ in range(requests)]
            # The order alternates, so that drift of the machine affects both.
            for name in ("without", "with") if turn % 2 == 0 else ("with", "without"):
                results[name].append(block(handlers[name], body, gaps))
                drained(handlers[name])
        shadow = handlers["with"].describe_handle()["verify"].get("shadow", {})
    rows = compared(results["without"], results["with"])
    out.print(table(f"{model}, one photo, {utilization:.0%} of {rate:.1f} requests/s, shadow {share:g}", rows))
    if shadow:
        out.print(
            f"checked {shadow['checked']} of {blocks * requests} requests in {shadow['seconds']:.2f} s, "
            f"skipped {shadow['skipped']} {shadow['why_skipped'] or ''}, differed {shadow['mismatches']}"
        )
    late = statistics.median(one["late"] for one in results["without"])
    if late > SATURATED:
        out.print(f"The handler could not keep up ({late:.2f} of the time): the figures say nothing about idle time.")
    facts = {"model": model, "share": share, "budget": budget, "utilization": utilization, "capacity": rate}
    output.write_json(json_path, {**facts, "rows": rows, "shadow": shadow, "blocks": results})


if __name__ == "__main__":
    typer.run(main)
