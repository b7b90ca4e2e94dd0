"""Times each task of Hugging Face models against the same handler in eager PyTorch, from request to answer.

Each task has the model-config.yaml that `init` writes for it, so that it runs in the precision that it chooses itself.

    python scripts/benchmarks/tasks.py
    python scripts/benchmarks/tasks.py --precision f32 --only text_classifier
    python scripts/benchmarks/tasks.py --only token_classifier,reranker --runs 50 --random 1000 --json tasks.json

Models have 6 layers, 384 wide, and random weights, but for the embedder, which is all-MiniLM-L6-v2. Texts, pictures and
recordings are of different sizes. Needs the extras `examples`, `hf` and `audio`.
"""

from __future__ import annotations

import importlib
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.harness import Call, interleave
from benchmarks.task_cases import CASES, Case, drawn
from benchmarks.workers import context_for, expect, own_threads
from torchserve_openvino.packaging.starter import templates
from torchserve_openvino.serving.requests.messages import encoded
from torchserve_openvino.tasks.catalog import TASKS

EAGER, OURS = "eager", "this package"
BATCHES = (1, 4)
# Shares of the largest text, picture or recording, in turn.
SIZES = (0.33, 0.13, 0.67, 1.0)
SECTIONS = {
    # Some text tasks ask the model several times for one request.
    "text": {"text": {"max_tokens": 128}, "batching": {"buckets": [1, 2, 4, 8]}},
    "audio": {"audio": {"max_seconds": 4.0}},
}


def settings_of(task: str, kind: str, precision: str) -> dict[str, Any]:
    """The task's ready-made model-config.yaml, for requests of these sizes.

    Args:
        task: Its name.
        kind: Of its inputs, as in `Case.kind`.
        precision: Instead of the template's; empty for that.
    """
    settings = yaml.safe_load(templates()[TASKS[task].template].read_text("utf-8"))
    settings["batchSize"] = max(BATCHES)
    settings["pt2"]["compile"]["options"]["model_caching"] = False
    section = settings["handler"]["openvino"]
    for key, value in SECTIONS.get(kind, {}).items():
        section[key] = {**section.get(key, {}), **value}
    if precision:
        section["precision"] = precision
    return settings


def started(case: Case, folder: Path, settings: dict[str, Any]) -> tuple[Any, Call]:
    """The task's handler, initialized on an unpacked archive, and what gives torch its threads."""
    module, name = case.handler.split(":")
    kind = getattr(importlib.import_module(f"torchserve_openvino.tasks.{module}"), name)
    context = context_for(folder, settings)
    handler = kind()
    handler.initialize(context)
    handler.context = context
    return handler, own_threads()


def ask(handler: Any, requests: list[Any]) -> list[Any]:
    """Answers a batch of requests; returns the bodies that TorchServe sends."""
    expect(handler.context, len(requests))
    return [encoded(answer) for answer in handler.handle([{"body": request} for request in requests], handler.context)]


def measure(case: Case, eager: Any, ours: Any, threads: dict[str, Call], runs: int) -> dict[str, Any]:
    """Times both contenders at each batch size, with inputs of four sizes in turn."""
    figures: dict[str, Any] = {}
    for size in BATCHES:
        requests = [case.request(drawn(case.kind, share, seed)) for seed, share in enumerate(SIZES[:size])]
        calls: dict[str, Call] = {EAGER: lambda r=requests: ask(eager, r), OURS: lambda r=requests: ask(ours, r)}
        times = interleave(calls, runs, 3, before=threads)
        figures[f"batch {size}"] = {
            "eager_ms": times.median(EAGER),
            "ours_ms": times.median(OURS),
            "speedup": times.ratio(EAGER, OURS),
        }
    return figures


def proof(handler: Any) -> dict[str, Any]:
    """By what the task's answers were compared with eager PyTorch's, the worst figure, and its bound."""
    verified = handler.describe_handle()["verify"]
    measure = verified.get("measure")
    if measure is None or "worst" not in measure:
        return {"measure": "largest difference", "worst": verified["max_abs"], "bound": verified["tolerance"]}
    return {"measure": measure["name"], "worst": measure["worst"], "bound": f"{measure['bound']:g}"}


def after_random_sizes(case: Case, handler: Any, count: int) -> int:
    """Sends requests of random sizes; returns how often something was compiled for one."""
    draw = random.Random(1)
    for number in range(count):
        body = case.request(drawn(case.kind, draw.random(), number))
        ask(handler, [body])
    return int(handler.describe_handle()["serving"]["compiles_after_ready"])


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """The table of docs/benchmarks.md."""
    lines = ["| times eager | model | precision | worst, and its bound | batch 1 | batch 4, mixed sizes | ms |"]
    lines += ["| --- | --- | --- | --- | ---: | ---: | --- |"]
    for row in rows:
        one, four = (row[f"batch {size}"] for size in BATCHES)
        lines.append(
            f"| {row['task']} | {row['model']} | {row['precision']} "
            f"| {row['measure']} {row['worst']:.6g}; {row['bound']} "
            f"| {one['speedup']:.2f} | {four['speedup']:.2f} | {one['ours_ms']:.1f} and {four['ours_ms']:.1f}, eager "
            f"{one['eager_ms']:.1f} and {four['eager_ms']:.1f} |"
        )
    requests = sum(row["requests"] for row in rows)
    compiled = sum(row["compiles_after_ready"] for row in rows)
    least, fallbacks = min(row["coverage"] for row in rows), sum(row["fallbacks"] for row in rows)
    return [
        *lines, "",
        f"Least coverage {least:.1%}, {fallbacks} fallbacks; {compiled} compiled in {requests:,} requests of random "
        "sizes.",
    ]  # fmt: skip


def main(
    only: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(CASES)}")] = ",".join(CASES),
    runs: Annotated[int, typer.Option(help="Measured turns.", min=5)] = 30,
    precision: Annotated[str, typer.Option(help="Of all tasks; by default what each template says: auto.")] = "",
    randoms: Annotated[int, typer.Option("--random", help="Requests of random sizes for each task.", min=0)] = 100,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Renew the table in docs/benchmarks.md.")] = False,
) -> None:
    """Times tasks from request to answer."""
    warnings.filterwarnings("ignore")
    out, results = output.results(), []
    for name in output.chosen(only, CASES, "--only"):
        case = CASES[name]
        output.progress.print(f"{name}: preparing")
        with tempfile.TemporaryDirectory(prefix="tsov-bench-") as root:
            folder = Path(root)
            case.save(folder)
            plain = {
                "batchSize": max(BATCHES),
                "pt2": {"compile": {"enable": False}},
                "handler": {"openvino": SECTIONS.get(case.kind, {})},
            }
            eager, all_cores = started(case, folder, plain)
            ours, few = started(case, folder, settings_of(name, case.kind, precision))
            summary = ours.report.summary
            row: dict[str, Any] = {
                "task": name,
                "model": case.model or "all-MiniLM-L6-v2",
                "precision": summary.precision,
                **proof(ours),
                "coverage": summary.coverage,
                "fallbacks": summary.fallbacks,
                **measure(case, eager, ours, {EAGER: all_cores, OURS: few}, runs),
            }
            row["requests"] = randoms
            row["compiles_after_ready"] = after_random_sizes(case, ours, randoms)
        results.append(row)
    columns = ["task", "model", "precision", "measure", "worst", "bound", "coverage", "fallbacks"]
    columns += [f"{what}, batch {size}" for size in BATCHES for what in ("eager ms", "ms", "x")]
    columns.append("compiled after READY")
    cells = [
        (
            row["task"], row["model"], row["precision"], row["measure"], f"{row['worst']:.6g}", row["bound"],
            f"{row['coverage']:.1%}", str(row["fallbacks"]),
            *(f"{row[f'batch {size}'][key]:.2f}" for size in BATCHES for key in ("eager_ms", "ours_ms", "speedup")),
            f"{row['compiles_after_ready']} of {row['requests']}",
        )
        for row in results
    ]  # fmt: skip
    out.print(output.table("Tasks, request to answer", columns, cells, left=4))
    output.write_json(json_path, {"results": results})
    if write:
        output.write_section(Path(__file__).name, markdown(results))


if __name__ == "__main__":
    typer.run(main)
