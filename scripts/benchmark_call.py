"""Times one model call: eager, Inductor, OpenVINO's own torch.compile backend, this package, and raw OpenVINO.

All contenders run in one process and take turns, in another order each time, so that a change in the machine's speed
meets all of them; quote the ratios. Each answer is compared with eager float32. Needs the extras `examples` and `hf`,
and a C++ compiler.

    python scripts/benchmark_call.py
    python scripts/benchmark_call.py --models resnet50 --precision f32 --runs 200 --json call.json
"""

from __future__ import annotations

import copy
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent / "lib"))
from bench_models import MODELS, BenchModel, tensors

Call = Callable[[], Any]
console = Console(stderr=True)
OURS, RAW, EAGER = "this package", "raw OpenVINO", "eager"


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
    """As `tov.compile` returns it: Dynamo's guards and the check for changed weights at each call."""
    return _ours(model, precision, freeze=False)


def ours(model: BenchModel, precision: str) -> tuple[Call, str]:
    """As the handler serves it: frozen, since nobody changes the model after loading."""
    return _ours(model, precision, freeze=True)


def _ours(model: BenchModel, precision: str, freeze: bool) -> tuple[Call, str]:
    import torchserve_openvino as tov

    compiled = tov.compile(model.module, options={"config": {"INFERENCE_PRECISION_HINT": precision}})
    if freeze:
        compiled.freeze()
        compiled(**model.kwargs)
    compiled(**model.kwargs)
    summary = compiled.report.summary
    console.print(f"    {compiled.report.summary_line()}", highlight=False)
    if summary.coverage != 1.0 or summary.fallbacks:
        console.print(f"[red]{compiled.report.to_text()}")
    return lambda: compiled(**model.kwargs), f"{summary.precision}, coverage {summary.coverage:.0%}"


def raw(model: BenchModel, precision: str) -> tuple[Call, str]:
    import openvino as ov

    # A copy: exporting writes to the tables of the modules, after which Dynamo never trusts them unread again, and what
    # would be timed as guards is what happens in no server.
    exported = torch.export.export(copy.deepcopy(model.module), (), model.kwargs)
    converted = ov.convert_model(exported)
    compiled = ov.Core().compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": precision})
    request = compiled.create_infer_request()
    inputs = [tensor.numpy() for tensor in model.kwargs.values()]
    effective = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()

    def call() -> list[torch.Tensor]:
        # The least work that an OpenVINO program can do: no copy of inputs or outputs.
        result = request.infer(inputs, share_inputs=True, share_outputs=True)
        return [torch.from_numpy(result[port]) for port in compiled.outputs]

    return call, str(effective)


CONTENDERS: dict[str, Callable[[BenchModel, str], tuple[Call, str]]] = {
    EAGER: eager,
    "Inductor": inductor,
    "stock backend + aot": stock,
    "this package (guarded)": ours_guarded,
    OURS: ours,
    RAW: raw,
}


def worst_difference(answer: Any, expected: list[torch.Tensor]) -> float:
    pairs = zip(tensors(answer), expected, strict=False)
    return max(float((a.float() - b.float()).abs().max()) for a, b in pairs)


def measure(
    model: BenchModel, precision: str, runs: int, warmup: int, contenders: Sequence[str]
) -> list[dict[str, Any]]:
    """Medians in milliseconds, contenders taking turns.

    Args:
        contenders: Names of `CONTENDERS`.
        runs: Counted calls of each.
        warmup: Calls of each before.
    """
    expected = [tensor.clone() for tensor in tensors(model.module(**model.kwargs))]
    calls: dict[str, Call] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in contenders:
        make = CONTENDERS[name]
        console.print(f"  {model.name} {precision}: preparing {name}", highlight=False)
        start = time.perf_counter()
        try:
            call, states = make(model, precision)
            difference = worst_difference(call(), expected)
        except Exception as error:
            console.print(f"  [red]{name} failed: {type(error).__name__}: {str(error).splitlines()[0]}")
            rows[name] = {"contender": name, "failed": f"{type(error).__name__}: {error}"}
            continue
        calls[name] = call
        rows[name] = {
            "contender": name,
            "states": states,
            "first_call_seconds": time.perf_counter() - start,
            "max_abs_difference": difference,
        }
    times: dict[str, list[float]] = {name: [] for name in calls}
    shuffled = random.Random(0)
    for turn in range(warmup + runs):
        # Torch's threads spin for a while after their work, and whoever comes next pays.
        for name in shuffled.sample(list(calls), len(calls)):
            start = time.perf_counter()
            calls[name]()
            if turn >= warmup:
                times[name].append((time.perf_counter() - start) * 1e3)
    for name, values in times.items():
        deciles = statistics.quantiles(values, n=10)
        rows[name] |= {"median_ms": statistics.median(values), "p10_ms": deciles[0], "p90_ms": deciles[-1]}
        # Pairs of the same turn: what the machine did in that moment, it did to both.
        rows[name]["over_raw"] = _ratio(values, times.get(RAW))
        rows[name]["over_eager"] = _ratio(times.get(EAGER), values)
        rows[name]["above_raw_ms"] = _median_difference(values, times.get(RAW))
    return list(rows.values())


def _ratio(values: list[float] | None, base: list[float] | None) -> float | None:
    return statistics.median(a / b for a, b in zip(values, base, strict=True)) if values and base else None


def _median_difference(values: list[float], base: list[float] | None) -> float | None:
    return statistics.median(a - b for a, b in zip(values, base, strict=True)) if base else None


def table(model: str, precision: str, rows: list[dict[str, Any]]) -> Table:
    result = Table(title=f"{model}, {precision}, batch 1")
    for column in ("contender", "median ms", "p10..p90", "x raw", "ms above raw", "eager / it", "max |diff|", "states"):
        result.add_column(column, justify="left" if column in {"contender", "states"} else "right")
    for row in rows:
        if "failed" in row:
            result.add_row(row["contender"], "failed", "", "", "", "", "", row["failed"].splitlines()[0][:60])
            continue
        number = {
            key: f"{row[key]:.2f}" if row[key] is not None else "" for key in ("over_raw", "above_raw_ms", "over_eager")
        }
        result.add_row(
            row["contender"],
            f"{row['median_ms']:.2f}",
            f"{row['p10_ms']:.2f}..{row['p90_ms']:.2f}",
            number["over_raw"],
            number["above_raw_ms"],
            number["over_eager"],
            f"{row['max_abs_difference']:.2g}",
            row["states"],
        )
    return result


def main(
    models: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(MODELS)}")] = ",".join(MODELS),
    precision: Annotated[str, typer.Option(help="Comma-separated: f32, bf16")] = "f32,bf16",
    runs: Annotated[int, typer.Option(help="Counted calls of each contender", min=10)] = 100,
    warmup: Annotated[int, typer.Option(help="Calls before that", min=1)] = 10,
    contenders: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(CONTENDERS)}")] = ",".join(CONTENDERS),
    threads: Annotated[int, typer.Option(help="torch's threads; 0: its own choice", min=0)] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
) -> None:
    """Times one call of each contender on each model."""
    from torchserve_openvino.report.environment import environment

    chosen = contenders.split(",")
    if unknown := set(chosen) - set(CONTENDERS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(CONTENDERS)}")
    warnings.filterwarnings("ignore")
    # A file or a pipe has no width: wide enough for the table, so that no cell is cut.
    out = Console() if sys.stdout.isatty() else Console(width=150)
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    results = []
    with torch.inference_mode():
        for name in models.split(","):
            with torch.inference_mode(False):
                model = MODELS[name]()
            for one in precision.split(","):
                torch._dynamo.reset()
                rows = measure(model, one, runs, warmup, chosen)
                results.append({"model": model.name, "precision": one, "runs": runs, "contenders": rows})
                out.print(table(model.name, one, rows))
    if json_path is not None:
        json_path.write_text(json.dumps({"environment": environment(), "results": results}, indent=2))
        console.print(f"wrote {json_path}")


if __name__ == "__main__":
    typer.run(main)
