"""Runs torch's own operator database through this package and compares every answer with eager PyTorch.

Each of op_db's operators runs on several of torch's samples in float32, int64, int32, bool and float16, and in float32
at the sizes that users have; so does each core ATen overload, at torch's sizes. The outcomes are compared with the
checked-in tables in tests/conformance; exit status 1 means that an outcome got worse or was wrong. A full run takes
about 20 minutes on two cores.

    python scripts/op_conformance.py
    python scripts/op_conformance.py --ops add,nn.functional.softplus --dtypes float32,int64 --samples 20
    python scripts/op_conformance.py --extremes
    python scripts/op_conformance.py --followed
    python scripts/op_conformance.py --modes static,dynamic,openvino_ts,export
    python scripts/op_conformance.py --core-only
    python scripts/op_conformance.py --write
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

sys.path.insert(0, str(Path(__file__).parent))
from conformance import cases, core, pool, table, tasks
from conformance.outcome import FAILURES, OUTCOMES, Outcome
from conformance.run_case import MODES

console = Console(stderr=True)
# With symbolic sizes, torch's shape expressions for a transposed convolution take 50 s per sample.
_SECONDS = 600.0


def main(
    ops: Annotated[str, typer.Option(help="Operators by op_db's names, comma-separated; all without it.")] = "",
    dtypes: Annotated[
        str,
        typer.Option(help=f"Types to run in; real_sizes is float32 at real sizes. Further: {', '.join(cases.NARROW)}."),
    ] = (",".join(cases.COLUMNS)),
    samples: Annotated[int, typer.Option(help="Samples of each operator.")] = table.SAMPLES,
    jobs: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    extremes: Annotated[
        bool,
        typer.Option("--extremes", help="Very large and small numbers among the samples; says only what is wrong."),
    ] = False,
    followed: Annotated[
        bool, typer.Option("--followed", help="Numbers behind each operator's outputs; says only what is wrong.")
    ] = False,
    modes: Annotated[str, typer.Option(help="static, dynamic, openvino_ts, export; or several.")] = "static",
    core_only: Annotated[bool, typer.Option("--core-only", help="The core ATen overloads alone.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Renew the checked-in tables instead of comparing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcomes as JSON.")] = False,
) -> None:
    """Runs torch's operator database through OpenVINO and compares it with eager and with the checked-in tables.

    Examples: op_conformance.py --ops add,softmax --samples 20; op_conformance.py --core-only; op_conformance.py --write
    """
    warnings.filterwarnings("ignore")
    only = [name for name in ops.split(",") if name]
    if unknown := [name for name in only if name not in cases.op_infos()]:
        raise typer.BadParameter(f"op_db has no operator {unknown[0]!r}; `torch.linalg.svd` is `linalg.svd` there")
    chosen = [name for name in dtypes.split(",") if name]
    known = (*cases.COLUMNS, *cases.NARROW)
    if unknown := [name for name in chosen if name not in known]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}", param_hint="--dtypes")
    narrow = not set(chosen) <= set(cases.COLUMNS)
    if (extremes or followed or narrow) and (write or core_only):
        raise typer.BadParameter("--extremes, --followed and narrow types have no table, and go with op_db alone")
    ways = [mode for mode in modes.split(",") if mode]
    if unknown := [mode for mode in ways if mode not in MODES]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(MODES)}", param_hint="--modes")
    if core_only and (only or "static" not in ways):
        raise typer.BadParameter("the core overloads run all, in static mode", param_hint="--core-only")
    if write and samples != table.SAMPLES:
        raise typer.BadParameter(f"the tables are made with {table.SAMPLES} samples", param_hint="--samples")
    names = only or sorted(cases.op_infos())
    calls = (
        {} if core_only else {mode: _run_op_db(names, chosen, samples, jobs, extremes, mode, followed) for mode in ways}
    )
    apart = extremes or followed or narrow
    overloads = {} if apart or only or "static" not in ways else _run_core(jobs)
    if as_json:
        typer.echo(json.dumps({"versions": table.versions(), "op_db": calls, "core": overloads}))
    if apart:
        for op_db in calls.values():
            _print(op_db)
        failed = (_failed(entry) for op_db in calls.values() for es in op_db.values() for entry in es.values())
        raise typer.Exit(any(failed))
    whole = not only and set(chosen) == set(cases.COLUMNS)
    raise typer.Exit(_conclude(calls, overloads, write, whole))


def _run_op_db(
    names: list[str], dtypes: list[str], samples: int, jobs: int, extremes: bool, mode: str, followed: bool
) -> table.Table:
    selected = [
        tasks.op_task(name, dtype, samples, extremes, mode, followed)
        for name in names
        for dtype in dtypes
        if dtype in cases.supported(name)
        and not (extremes and name in cases.NO_EXTREMES)
        and not ((extremes or followed) and dtype == cases.REAL)
    ]
    return _run(selected, jobs, f"op_db, {mode}")


def _run_core(jobs: int) -> table.Table:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "recorded.pt")
        with console.status("Recording what eager PyTorch calls the core overloads with"):
            core.save_recorded(path)
        return _run([tasks.core_task(name, path) for name in core.overloads()], jobs, "core ATen")


def _run(calls: list[dict[str, Any]], jobs: int, title: str) -> table.Table:
    results: table.Table = {}
    columns = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=len(calls))

        def done(task: dict[str, Any], outcome: Outcome) -> None:
            results.setdefault(task["name"], {})[task.get("dtype", "core")] = str(outcome)
            progress.advance(bar)
            if outcome.name in FAILURES:
                progress.console.print(f"{task['name']} {task.get('dtype', '')}: {outcome}", style="red", markup=False)

        pool.run_all(calls, jobs, _SECONDS, done)
    return results


def _conclude(op_db: dict[str, table.Table], overloads: table.Table, write: bool, whole: bool) -> int:
    worse: list[str] = []
    files = [(mode, table.op_db_path(mode), fresh, whole) for mode, fresh in op_db.items()]
    for title, path, fresh, replaces in (*files, ("core ATen", table.CORE, overloads, True)):
        if fresh:
            console.print(title)
            _print(fresh)
        known = table.read(path)
        if write:
            if fresh:
                merged = {name: known.get(name, {}) | entries for name, entries in fresh.items()}
                # A run of everything also drops the operators that torch no longer has.
                table.write(path, fresh if replaces else known | merged)
            worse += [f"{name} {entry}" for name, es in fresh.items() for entry in es.values() if _failed(entry)]
            continue
        regressions, better = table.compare(fresh, known)
        worse += regressions
        for line in better:
            console.print(f"better: {line}; renew the table with --write", markup=False, highlight=False)
    if write:
        tables = {mode: table.read(table.op_db_path(mode)) for mode in MODES}
        table.SUMMARY.write_text(table.summary(tables, table.read(table.CORE)), encoding="utf-8")
    for line in worse:
        console.print(f"worse: {line}", style="red", markup=False)
    return 1 if worse else 0


def _failed(entry: str) -> bool:
    return table.outcome_name(entry) in FAILURES


def _print(results: table.Table) -> None:
    by_dtype = table.counts(results)
    shown = RichTable("outcome", *by_dtype)
    for name in (*OUTCOMES, *FAILURES):
        if any(by_dtype[dtype][name] for dtype in by_dtype):
            shown.add_row(name, *(str(by_dtype[dtype][name]) for dtype in by_dtype))
    console.print(shown)
    console.print(f"{table.share(results):.1%} of those that compute something run on OpenVINO")


if __name__ == "__main__":
    typer.run(main)
