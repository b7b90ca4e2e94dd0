"""Compares whole servers: TorchServe with eager PyTorch, with Inductor, with this package; LitServe with raw OpenVINO.

Each is started on free loopback ports, gets the same photos for the same EfficientNet-Lite0 from a client in a process
of its own, and is stopped before the next one starts. Every answer is compared with eager PyTorch's. The client shares
the machine with the servers; quote the ratios. Needs the extra `examples`, `pip install litserve aiohttp matplotlib`,
and a C++ compiler for Inductor. How the TorchServes are configured: scripts/benchmarks/servers/*.yaml.

    python scripts/benchmarks/serving.py --quick
    python scripts/benchmarks/serving.py --rounds 3 --json serving.json --plot serving.png
    python scripts/benchmarks/serving.py --only ours,litserve-openvino --concurrency 1,32 --rates 20,40
    python scripts/benchmarks/serving.py --only ours --ours-config my-model-config.yaml
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.servers import cycle, exit_on_signals, photos, plots, tables
from benchmarks.servers.contenders import NAMES, OURS, Options

QUICK_SECONDS, SECONDS = 3.0, 10.0
app = typer.Typer(add_completion=False, rich_markup_mode=None)


def listed(text: str, kind: type, option: str) -> list[Any]:
    """`1,8,16` as positive numbers."""
    try:
        values = [kind(one) for one in text.split(",")]
    except ValueError:
        values = []
    if not values or any(value <= 0 for value in values):
        raise typer.BadParameter(f"comma-separated numbers above 0, not {text!r}", param_hint=option)
    return values


def properties(lines: list[str]) -> dict[str, str]:
    """KEY=VALUE, as config.properties has them."""
    wrong = [line for line in lines if "=" not in line]
    if wrong:
        raise typer.BadParameter(f"KEY=VALUE, not {wrong[0]!r}", param_hint="--torchserve-property")
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


# \b keeps the lines of a paragraph as they are.
@app.command(help="\b\n" + (__doc__ or "").replace("\n\n", "\n\n\b\n"))
def main(
    only: Annotated[str, typer.Option(help="Comma-separated contenders")] = ",".join(NAMES),
    concurrency: Annotated[str, typer.Option(help="Closed loop: numbers of clients")] = "1,8,16",
    rates: Annotated[
        str | None, typer.Option(help="Open loop: requests/s. Default: 50 and 80 % of ours' closed-loop throughput")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help=f"Each load [default: {SECONDS:.0f}]", min=0.5)] = None,
    warmup: Annotated[
        float | None, typer.Option(help="Load before the first one [default: --seconds]", min=0.1)
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often all contenders take turns", min=1)] = 1,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_SECONDS:.0f} s for each load")] = False,
    cap: Annotated[int, typer.Option(help="Open loop: outstanding requests, above which arrivals drop", min=1)] = 256,
    seed: Annotated[int, typer.Option(help="Open loop: of the arrivals")] = 0,
    ours_config: Annotated[
        Path,
        typer.Option(help="Its model-config.yaml", exists=True, dir_okay=False, show_default="servers/ours.yaml"),
    ] = Options.ours_config,
    torchserve_property: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for config.properties of every TorchServe; repeatable")
    ] = None,
    litserve_workers: Annotated[int, typer.Option(min=1)] = Options.litserve_workers,
    litserve_batch: Annotated[int, typer.Option(help="Largest batch", min=1)] = Options.litserve_batch,
    litserve_api_servers: Annotated[
        int, typer.Option(help="Processes that speak HTTP", min=1)
    ] = Options.litserve_api_servers,
    precision: Annotated[
        Literal["f32", "bf16", "auto"],
        typer.Option(help="Of ours and of LitServe; auto: ours decides, LitServe has bf16. The others run in f32"),
    ] = "f32",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture here, e.g. serving.png")] = None,
) -> None:
    duration = seconds or (QUICK_SECONDS if quick else SECONDS)
    plan = cycle.Plan(
        names=output.chosen(only, NAMES, "--only"),
        clients=listed(concurrency, int, "--concurrency"),
        rates=listed(rates, float, "--rates") if rates else None,
        seconds=duration,
        warmup=warmup or duration,
        rounds=rounds,
        cap=cap,
        seed=seed,
    )
    options = Options(
        ours_config=ours_config.resolve(),
        properties=properties(torchserve_property or []),
        litserve_workers=litserve_workers,
        litserve_batch=litserve_batch,
        litserve_api_servers=litserve_api_servers,
        precision=precision,
    )
    exit_on_signals()
    warnings.filterwarnings("ignore")
    raise typer.Exit(run(plan, options, json_path, plot))


def run(plan: cycle.Plan, options: Options, json_path: Path | None, plot: Path | None) -> int:
    """Measures, prints and writes; returns exit status 1 if `ours` failed or gave a wrong answer."""
    with output.progress.status("what eager PyTorch answers"):
        sent = photos.load()
    names = ", ".join(f"{one.name} ({one.label})" for one in sent)
    output.progress.print(f"{len(sent)} photos: {names}", soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="tsov-bench-") as folder:
        results = cycle.Cycle(plan, options, sent, Path(folder), output.progress).run()
    out = output.results()
    medians = f", medians of {plan.rounds} rounds" if plan.rounds > 1 else ""
    if any(one.figures for one in results):
        out.print(tables.loads(results, f"EfficientNet-Lite0, {options.precision}, {plan.seconds:g} s each{medians}"))
        out.print(tables.processes(results))
    ratios = tables.ratio_table(results)
    if ratios is not None:
        out.print(ratios)
    for line in tables.absent(results):
        out.print(line, markup=False, soft_wrap=True)
    sent_as = [{"name": one.name, "bytes": len(one.data), "label": one.label, "margin": one.margin} for one in sent]
    contenders = [one.as_json() for one in results]
    ratios_of = tables.ratios(results)
    output.write_json(json_path, {"plan": vars(plan), "photos": sent_as, "ratios": ratios_of, "contenders": contenders})
    if plot is not None:
        plots.draw(results, plot)
        output.progress.print(f"wrote {plot}")
    ours = next((one for one in results if one.name == OURS), None)
    return int(ours is not None and bool(ours.failed or ours.errors))


if __name__ == "__main__":
    app()
