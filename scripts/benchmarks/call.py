"""Times one model call: eager, Inductor, OpenVINO's own torch.compile backend, this package, and raw OpenVINO.

All contenders run interleaved in one process; compare the ratios. Each answer is compared with eager float32. Needs the
extras `examples` and `hf`, and a C++ compiler.

    python scripts/benchmarks/call.py
    python scripts/benchmarks/call.py --models resnet50 --precision f32 --runs 200 --json call.json
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.harness import Call, interleave
from benchmarks.models import MODELS, BenchModel, raw_openvino, tensors
from torchserve_openvino.errors import class_and_line

OURS, RAW, EAGER = "this package", "raw OpenVINO", "eager"
PRECISIONS = ("f32", "bf16")


def eager(model: BenchModel, precision: str) -> tuple[Call, str]:
    if precision == "bf16":
        model = model.cast(torch.bfloat16)
    return lambda: model.module(**model.kwargs), precision


def inductor(model: BenchModel, precision: str) -> tuple[Call, str]:
    if precision == "bf16":
        model = model.cast(torch.bfloat16)
    compiled = torch.compile(model.module, backend="inductor", dynamic=False)
    return lambda: compiled(**model.kwargs), precision


def stock(model: BenchModel, precision: str) -> tuple[Call, str]:
    import openvino.torch  # noqa: F401  registers OpenVINO's own backend

    options = {"aot_autograd": True, "config": {"INFERENCE_PRECISION_HINT": precision}}
    compiled = torch.compile(model.module, backend="openvino", dynamic=False, options=options)
    return lambda: compiled(**model.kwargs), f"{precision} asked for"


def ours_guarded(model: BenchModel, precision: str) -> tuple[Call, str]:
    """Guarded, as `tov.compile` returns it: each call runs Dynamo's guards and checks for changed weights."""
    return _ours(model, precision, freeze=False)


def ours(model: BenchModel, precision: str) -> tuple[Call, str]:
    """Frozen, as the handler serves it."""
    return _ours(model, precision, freeze=True)


def _ours(model: BenchModel, precision: str, freeze: bool) -> tuple[Call, str]:
    import torchserve_openvino as tov

    compiled = tov.compile(model.module, options={"config": {"INFERENCE_PRECISION_HINT": precision}})
    if freeze:
        compiled.freeze()
        compiled(**model.kwargs)
    compiled(**model.kwargs)
    summary = compiled.report.summary
    output.progress.print(f"    {compiled.report.summary_line()}")
    if summary.coverage != 1.0 or summary.fallbacks:
        output.progress.print(f"[red]{compiled.report.to_text()}")
    return lambda: compiled(**model.kwargs), f"{summary.precision}, coverage {summary.coverage:.0%}"


def raw(model: BenchModel, precision: str) -> tuple[Call, str]:
    call, compiled = raw_openvino(model, {"INFERENCE_PRECISION_HINT": precision})
    return call, str(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())


CONTENDERS: dict[str, Callable[[BenchModel, str], tuple[Call, str]]] = {
    EAGER: eager,
    "Inductor": inductor,
    "stock backend + aot": stock,
    "this package (guarded)": ours_guarded,
    OURS: ours,
    RAW: raw,
}


def worst_difference(answer: Any, expected: list[torch.Tensor]) -> float:
    """Greatest absolute difference; NaN if any value is NaN."""
    pairs = zip(tensors(answer), expected, strict=True)
    differences = [float((a.float() - b.float()).abs().max()) for a, b in pairs]
    return float("nan") if any(map(math.isnan, differences)) else max(differences)


def measure(
    model: BenchModel, precision: str, runs: int, warmup: int, contenders: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns the figures of each contender, or why it failed.

    Args:
        runs: Measured calls of each.
        warmup: Calls of each before these.
        contenders: Names of `CONTENDERS`.
    """
    expected = [tensor.clone() for tensor in tensors(model.module(**model.kwargs))]
    calls: dict[str, Call] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in contenders:
        output.progress.print(f"  {model.name} {precision}: preparing {name}")
        start = time.perf_counter()
        try:
            call, states = CONTENDERS[name](model, precision)
            difference = worst_difference(call(), expected)
        except Exception as error:
            output.progress.print(f"  [red]{name} failed: {class_and_line(error)}")
            rows[name] = {"contender": name, "failed": f"{type(error).__name__}: {error}"}
            continue
        calls[name] = call
        first = time.perf_counter() - start
        rows[name] = {
            "contender": name, "states": states, "first_call_seconds": first, "max_abs_difference": difference
        }  # fmt: skip
    times = interleave(calls, runs, warmup)
    for name in calls:
        low, high = times.deciles(name)
        rows[name] |= {
            "median_ms": times.median(name),
            "p10_ms": low,
            "p90_ms": high,
            "over_raw": times.ratio(name, RAW),
            "over_eager": times.ratio(EAGER, name),
            "above_raw_ms": times.above(name, RAW),
        }
    return list(rows.values())


def table(model: str, precision: str, rows: list[dict[str, Any]]) -> Table:
    columns = ("contender", "median ms", "p10..p90", "x raw", "ms above raw", "eager / it", "max |diff|", "states")
    cells = []
    for row in rows:
        if "failed" in row:
            cells.append((row["contender"], "failed", "", "", "", "", "", row["failed"].splitlines()[0][:60]))
            continue
        ratios = (output.number(row[key]) for key in ("over_raw", "above_raw_ms", "over_eager"))
        spread = f"{row['p10_ms']:.2f}..{row['p90_ms']:.2f}"
        difference = f"{row['max_abs_difference']:.2g}"
        cells.append((row["contender"], f"{row['median_ms']:.2f}", spread, *ratios, difference, row["states"]))
    return output.table(f"{model}, {precision}, batch 1", columns, cells)


def main(
    models: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(MODELS)}")] = ",".join(MODELS),
    precision: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(PRECISIONS)}")] = ",".join(PRECISIONS),
    runs: Annotated[int, typer.Option(help="Measured calls of each contender", min=10)] = 100,
    warmup: Annotated[int, typer.Option(help="Calls before that", min=1)] = 10,
    contenders: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(CONTENDERS)}")] = ",".join(CONTENDERS),
    threads: Annotated[int, typer.Option(help="torch's threads; 0: its own choice", min=0)] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
) -> None:
    """Times one call of each contender on each model."""
    names = output.chosen(contenders, CONTENDERS, "--contenders")
    precisions = output.chosen(precision, PRECISIONS, "--precision")
    warnings.filterwarnings("ignore")
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    out, results = output.results(), []
    with torch.inference_mode():
        for key in output.chosen(models, MODELS, "--models"):
            with torch.inference_mode(False):
                model = MODELS[key]()
            for one in precisions:
                torch._dynamo.reset()
                rows = measure(model, one, runs, warmup, names)
                results.append({"model": model.name, "precision": one, "runs": runs, "contenders": rows})
                out.print(table(model.name, one, rows))
    output.write_json(json_path, {"results": results})


if __name__ == "__main__":
    typer.run(main)
