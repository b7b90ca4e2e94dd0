"""Runs published architectures, small and with random weights, and compares them with eager PyTorch.

Every model type of transformers that builds from a small configuration runs, with heads of 64 to 256, lengths of 1 to
257, padding on both sides, f32 and bf16, static and dynamic shapes, with and without a cache; so do timm's families and
torchvision's models, where they are installed. The cases of an architecture contain each of these values; with
`--cases 0` they contain each pair. Each case runs twice with other values, over memory full of garbage, in a process
that may crash. Exit status 1 means that a case was wrong or crashed. All of it takes some four hours on two cores,
so that the outcomes so far are kept in tests/conformance/architectures.jsonl.

    python scripts/architectures.py --sample
    python scripts/architectures.py --only llama,bert --heads 64,128
    python scripts/architectures.py --source timm --seconds 600
    python scripts/architectures.py --log tests/conformance/architectures.jsonl --seconds 3600
    python scripts/architectures.py --log tests/conformance/architectures.jsonl --write
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from isolation import pool
from isolation.process import Lost
from model_zoo import catalog, grid, results
from model_zoo.catalog import Architecture
from model_zoo.grid import Case
from model_zoo.outcome import FAILURES, RIGHT, Outcome
from model_zoo.sample import HEADS, NAMES

console = Console(stderr=True)
_WORKER = Path(__file__).parent / "model_zoo" / "worker.py"
# Dynamo and OpenVINO keep some memory per model.
_CASES_PER_PROCESS = 60
# In a log, where no progress bar moves.
_CASES_PER_LINE = 50


def main(
    only: Annotated[str, typer.Option(help="Architectures by name, comma-separated.")] = "",
    source: Annotated[str, typer.Option(help="transformers, timm, torchvision; or several.")] = ",".join(
        catalog.SOURCES
    ),
    sample: Annotated[
        bool, typer.Option("--sample", help="The few that differ in mechanism, heads 64 and 128.")
    ] = False,
    heads: Annotated[str, typer.Option(help="Sizes of attention heads.")] = ",".join(map(str, grid.HEADS)),
    cases: Annotated[int, typer.Option(help="Cases of each; by default enough for each value; 0 for each pair.")] = -1,
    threads: Annotated[int, typer.Option(help="OpenVINO's threads; by default one and two.")] = 0,
    property: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, as in options.config of the YAML.")] = None,
    jobs: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    seconds: Annotated[float, typer.Option(help="Start no further case after this time; 0 is no limit.")] = 0.0,
    limit: Annotated[float, typer.Option(help="Seconds for one case; what takes longer is a failure.")] = 120.0,
    log: Annotated[Path | None, typer.Option(help="Keeps each outcome; what it has already is not run again.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Renew the table in docs/conformance.md.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all results as JSON.")] = False,
) -> None:
    """Compares published architectures with eager PyTorch.

    Examples: architectures.py --sample; architectures.py --only llama,bert --heads 64,128 --cases 0;
    architectures.py --source timm --seconds 600 --json; architectures.py --log all.jsonl --write
    """
    warnings.filterwarnings("ignore")
    properties = dict(_pair(text) for text in property or [])
    listed, chosen = _chosen(only, source, sample), _cases(heads, cases, threads, sample)
    tally = _run(listed, chosen, properties, results.Log(log), jobs, seconds, limit)
    _print(tally)
    if write:
        results.write(tally)
    if as_json:
        typer.echo(json.dumps(tally.to_dict()))
    raise typer.Exit(1 if tally.failures else 0)


def _chosen(only: str, source: str, sample: bool) -> list[Architecture]:
    sources = tuple(filter(None, source.split(",")))
    if unknown := [name for name in sources if name not in catalog.SOURCES]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(catalog.SOURCES)}", param_hint="--source")
    listed, reasons = catalog.architectures(sources)
    for reason in reasons.values():
        console.print(f"Left out: {reason}", markup=False, highlight=False)
    names = [name for name in only.split(",") if name] or (list(NAMES) if sample else [])
    if unknown := sorted(set(names) - {architecture.name for architecture in listed}):
        raise typer.BadParameter(f"there is no architecture {unknown[0]!r}", param_hint="--only")
    # Those of the sample come first.
    listed.sort(key=lambda architecture: architecture.name not in NAMES)
    return [architecture for architecture in listed if not names or architecture.name in names]


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--property")
    return name, value


def _cases(heads: str, number: int, threads: int, sample: bool) -> list[Case]:
    try:
        sizes = HEADS if sample else tuple(int(size) for size in heads.split(","))
    except ValueError:
        raise typer.BadParameter(f"{heads!r} is no list of numbers", param_hint="--heads") from None
    pairs = grid.cases(sizes, threads)
    return pairs[: grid.values_covered(pairs) if number < 0 else number or None]


def _run(
    listed: list[Architecture],
    chosen: list[Case],
    properties: dict[str, str],
    log: results.Log,
    jobs: int,
    seconds: float,
    limit: float,
) -> results.Results:
    tally, known = results.Results(), set()
    for architecture, case, outcome in log.read():
        tally.add(architecture, case, outcome)
        known.add((architecture, case))
    began = time.monotonic()
    dicts = [case.to_dict() for case in chosen]
    # The first case of all comes before the second of any.
    tasks = [
        {"architecture": vars(architecture), "cases": dicts, "number": number, "properties": properties}
        for number, case in enumerate(chosen)
        for architecture in listed
        if (architecture, case) not in known
    ]
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("cases", total=len(tasks))

        def done(task: dict[str, Any], answer: dict[str, Any] | Lost) -> None:
            progress.advance(bar)
            ended = int(progress.tasks[bar].completed)
            if not console.is_terminal and ended % _CASES_PER_LINE == 0:
                console.print(f"{ended} of {len(tasks)} cases, {len(tally.failures)} failures", highlight=False)
            outcome = Outcome(answer.kind, answer.reason) if isinstance(answer, Lost) else Outcome(**answer)
            architecture, case = Architecture(**task["architecture"]), chosen[task["number"]]
            tally.add(architecture, case, outcome)
            log.append(architecture, case, outcome)
            if outcome.verdict in FAILURES:
                console.print(
                    f"{outcome.verdict} {architecture.name}: {case}: {outcome.detail}"[:400],
                    style="red", markup=False, highlight=False,
                )  # fmt: skip

        pool.run_all(
            tasks, jobs, lambda: pool.Worker(_WORKER, limit, _CASES_PER_PROCESS), done,
            enough=lambda: bool(seconds) and time.monotonic() - began > seconds,
        )  # fmt: skip
    return tally


def _print(tally: results.Results) -> None:
    table = Table("architecture", "inputs", "cases", "verdict", "difference", "coverage", "partitions", "fallbacks")
    for row in tally.sorted_rows():
        if row.verdict == "not built":
            continue
        largest = max((outcome.difference for outcome in row.ran), default=0.0)
        reasons = "; ".join(f"{reason[:70]}" for reason, _ in row.fallbacks.most_common(2))
        table.add_row(
            row.architecture.name, row.kind, str(len(row.outcomes)), row.verdict, f"{largest:.1g}",
            f"{row.coverage:.3f}", f"{row.partitions:.1f}", reasons, style="" if row.verdict == RIGHT else "red",
        )  # fmt: skip
    console.print(table)
    left = [row for row in tally.rows.values() if row.verdict == "not built"]
    for row in left:
        console.print(f"not built: {row.architecture.name}: {row.not_built[0]}"[:200], markup=False, highlight=False)
    for reason, names in tally.reasons()[:20]:
        console.print(f"{len(names):4} {reason} ({', '.join(names[:5])})", markup=False, highlight=False)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in tally.counts().most_common()))


if __name__ == "__main__":
    typer.run(main)
