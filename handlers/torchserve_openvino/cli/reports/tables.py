"""Prints a compile report as tables for a terminal."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchserve_openvino.cli.console import stdout
from torchserve_openvino.report.text import products_line, verify_line

if TYPE_CHECKING:
    from torchserve_openvino.packaging.inspect import Inspection

_MOST_SHAPES = 3

Column = tuple[str, Callable[[Mapping[str, Any]], Any]]


def _field(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda entry: entry.get(name)


def _of(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = entry.get(name)
    return section if isinstance(section, Mapping) else {}


def _seconds(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda entry: f"{float(entry.get(name) or 0):.2f}"


def _shapes_of(graph: Mapping[str, Any]) -> str:
    """Returns the shapes of a graph's inputs; ``dynamic`` or ``static`` where the report does not have them."""
    shapes = [str(shape) for shape in graph.get("inputs") or []]
    kind = "dynamic" if graph.get("dynamic") else "static"
    if not shapes:
        return kind
    more = [f"and {len(shapes) - _MOST_SHAPES} more"] if len(shapes) > _MOST_SHAPES else []
    return " ".join([*shapes[:_MOST_SHAPES], *more, *(["(dynamic)"] if kind == "dynamic" else [])])


# Reasons come last: they are the longest cells.
FALLBACKS: tuple[Column, ...] = (
    ("kind", _field("kind")),
    ("op", _field("op")),
    ("to", _field("to")),
    ("count", _field("count")),
    ("where", _field("where")),
    ("reason", _field("reason")),
)
GRAPH_BREAKS: tuple[Column, ...] = (
    ("count", _field("count")),
    ("where", _field("where")),
    ("reason", _field("reason")),
)
RECOMPILES: tuple[Column, ...] = (
    ("count", _field("count")),
    ("graph", _field("compile_id")),
    ("where", _field("where")),
    ("reason", _field("reason")),
)
WORKERS: tuple[Column, ...] = (
    ("pid", _field("pid")),
    ("worker", _field("worker")),
    ("coverage", lambda worker: f"{float(_of(worker, 'summary').get('coverage') or 0):.1%}"),
    ("precision", lambda worker: _of(worker, "summary").get("precision")),
    ("verified", lambda worker: "yes" if worker.get("verified") else "no"),
    ("requests", lambda worker: _of(worker, "counts").get("requests", 0)),
    ("fallbacks", lambda worker: ", ".join(f"{k} {n}" for k, n in _of(worker, "fallbacks").items()) or 0),
    ("compiles after READY", _field("compiles_after_ready")),
    ("policy", lambda worker: "holds" if _of(worker, "policy").get("holds") else "violated"),
)
GRAPHS: tuple[Column, ...] = (
    ("graph", _field("index")),
    ("where", _field("where")),
    ("stage", _field("stage")),
    ("inputs", _shapes_of),
    ("ops", _field("ops_total")),
    ("on OpenVINO", _field("ops_on_openvino")),
    ("lower s", _seconds("lower_seconds")),
)
PARTITIONS: tuple[Column, ...] = (
    ("graphs", _field("graphs")),
    ("partition", _field("name")),
    ("runs on", lambda part: " ".join([str(part.get("runs_on")), *(part.get("execution_devices") or [])])),
    ("ops", _field("ops")),
    ("weights", _field("constants")),
    ("MB", lambda part: f"{(part.get('constant_bytes') or 0) / 1e6:.1f}"),
    ("convert s", _seconds("convert_seconds")),
    ("compile s", _seconds("compile_seconds")),
    ("from cache", lambda part: "yes" if part.get("from_cache") else "no"),
)


def print_report(report: Mapping[str, Any], title: str, console: Console) -> None:
    """Prints summary, fallbacks, graph breaks, recompiles, graphs and partitions.

    Args:
        report: ``CompileReport.to_dict()``, possibly from another version of this package: keys may be missing.
        title: Name of the model, for the heading.
        console: The console to print to.
    """
    console.print(_summary(report, title))
    if len(workers := report.get("workers") or []) > 1:
        _print(console, "Workers (the tables below describe the one that answered)", WORKERS, workers)
    graphs = [graph for graph in report.get("graphs") or [] if isinstance(graph, Mapping)]
    _print(console, "Fallbacks", FALLBACKS, report.get("fallbacks") or [])
    _print(console, "Graph breaks", GRAPH_BREAKS, report.get("graph_breaks") or [])
    _print(console, "Recompiles", RECOMPILES, report.get("recompiles") or [])
    _print(console, "Graphs", GRAPHS, graphs)
    _print(console, "Partitions", PARTITIONS, _joined(graphs))
    for note in report.get("notes") or []:
        console.print(f"note: {note}")


def _joined(graphs: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the partitions; one row for those that differ in nothing but their graph, with the sum of the seconds."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for graph in graphs:
        for part in graph.get("partitions") or []:
            devices = tuple(part.get("execution_devices") or ())
            same = ("name", "runs_on", "ops", "constants", "constant_bytes", "from_cache")
            row = rows.setdefault((*(part.get(name) for name in same), devices), {**part, "indices": []})
            if row["indices"]:
                for name in ("convert_seconds", "compile_seconds"):
                    row[name] = (row.get(name) or 0) + (part.get(name) or 0)
            row["indices"].append(graph.get("index"))
    return [{**row, "graphs": _ranges(row["indices"])} for row in rows.values()]


def _ranges(indices: list[Any]) -> str:
    """Returns ``0-3, 7`` for 0, 1, 2, 3 and 7."""
    ranges: list[list[Any]] = []
    for index in indices:
        if ranges and isinstance(index, int) and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _summary(report: Mapping[str, Any], title: str) -> Table:
    summary = report.get("summary") or {}
    table = Table(title=Text(f"Compile report of {title}"), title_justify="left", show_header=False)
    coverage = float(summary.get("coverage") or 0.0)
    ops = f"{summary.get('ops_on_openvino', '?')} of {summary.get('ops_total', '?')} operators on OpenVINO"
    style = "green" if coverage >= 1.0 else "yellow"
    table.add_row(Text("coverage"), Text(f"{coverage:.1%} ({ops})", style=style))
    for name in ("device", "precision", "graphs", "partitions"):
        table.add_row(Text(name), Text(_text(summary.get(name))))
    if products := summary.get("products"):
        table.add_row(Text("products"), Text(products_line(products)))
    for name in ("fallbacks", "graph_breaks", "recompiles"):
        count = summary.get(name)
        table.add_row(Text(name.replace("_", " ")), Text(_text(count), style="yellow" if count else "green"))
    table.add_row(Text("compile seconds"), Text(_text(summary.get("compile_seconds"))))
    verify = report.get("verify") or {}
    if verify:
        bad = not verify.get("passed", True) or (verify.get("shadow") or {}).get("mismatches")
        good = "yellow" if verify.get("skipped") else "green"
        table.add_row(Text("verify"), Text(verify_line(verify), style="red" if bad else good))
    serving = report.get("serving") or {}
    if serving:
        compiles = serving.get("compiles_after_ready", 0)
        table.add_row(Text("compiles after READY"), Text(_text(compiles), style="yellow" if compiles else "green"))
        counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in serving.get("counts", {}).items())
        table.add_row(Text("requests"), Text(counts or "none yet"))
        policy = serving.get("policy") or {}
        for sentence in policy.get("violations", []):
            table.add_row(Text("policy"), Text(_text(sentence), style="red"))
    if report.get("pid"):
        table.add_row(Text("worker pid"), Text(_text(report["pid"])))
    return table


def _print(console: Console, title: str, columns: tuple[Column, ...], entries: list[Any]) -> None:
    rows = [entry for entry in entries if isinstance(entry, Mapping)]
    if not rows:
        console.print(f"{title}: none")
        return
    table = Table(*(name for name, _ in columns), title=Text(title), title_justify="left")
    for entry in rows:
        table.add_row(*(Text(_text(value(entry))) for _, value in columns))
    console.print(table)


def _text(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)


# --- whether an archive starts warm, as text ----------------------------------------------------------------------


def show(path: Path, verdict: "Inspection") -> None:
    """Prints how an archive starts on this machine, and why."""
    meaning = {
        "warm": "nothing is traced or compiled",
        "from IR": "nothing is traced; OpenVINO compiles",
        "cold": "everything is traced and compiled",
    }
    console = stdout()
    console.print(f"{path}: starts {verdict.start} here ({meaning[verdict.start]})")
    console.print(
        f"  model {verdict.model.get('modelName', '?')} {verdict.model.get('modelVersion', '?')}, "
        f"handler {verdict.model.get('handler', '?')}"
    )
    console.print(
        f"  {verdict.calls} input signature(s), {verdict.partitions} partition(s), {verdict.compiled} compiled for here"
    )
    for reason in verdict.reasons:
        console.print(f"  - {reason}")


# --- what quantizing a model cost and gained, as text -------------------------------------------------------------


def show_proof(facts: dict[str, Any], console: Console) -> None:
    """Prints accuracy against speed for each version of the model that was tried.

    Args:
        facts: As `QUANTIZED` in the archive holds them.
        console: Where to.
    """
    proof = facts["evaluation"]
    table = Table("in f32", proof["metric"], "drop", "ms", "times f32")
    before = proof["f32_milliseconds"]
    table.add_row("all", f"{proof['f32']:.4f}", "", f"{before:.2f}", "1.00")
    for step in proof["steps"]:
        taken = step["milliseconds"]
        table.add_row(
            f"{step['in_f32']} layers" if step["in_f32"] else "none", f"{step['value']:.4f}", f"{step['drop']:.4f}",
            f"{taken:.2f}", f"{before / taken:.2f}" if taken else "",
        )  # fmt: skip
    console.print(f"quantized by {facts['method']}, compared on {proof['items']} requests{_which(proof)}:")
    console.print(table)
    if proof["in_f32"]:
        console.print(f"left in f32: {', '.join(proof['in_f32'])}")


def _which(proof: dict[str, Any]) -> str:
    """Says whether the requests are those of the calibration; archives of earlier versions don't tell."""
    shared = proof.get("shared")
    if shared is None:
        return ""
    if not shared:
        return ", none of which it was calibrated on"
    some = "the very ones" if shared == proof["items"] else f"{shared} of them"
    return (
        f", {some} that it was calibrated on: the loss on others may be larger; name others in "
        "handler.openvino.quantize.evaluation.data"
    )


# --- options that several commands about a served model share -----------------------------------------------------


# TorchServe's management API; its inference API, and all of `serve`.
DEFAULT_MANAGEMENT, DEFAULT_URL = "http://127.0.0.1:8081", "http://127.0.0.1:8080"

Name = Annotated[str, typer.Argument(metavar="NAME", help="A model's name, or NAME/VERSION.", show_default=False)]
Management = Annotated[
    str,
    typer.Option(
        "--management", "--url",
        help="Address of TorchServe's management API, or of serve; if nothing answers at the default, port 8080.",
    ),
]  # fmt: skip
Token = Annotated[
    str | None,
    typer.Option(
        envvar="TORCHSERVE_MANAGEMENT_TOKEN",
        help="Management key, if the server requires one (in its key_file.json).",
        show_default=False,
    ),
]
Logs = Annotated[
    Path | None,
    typer.Option(help="TorchServe's log folder; by default LOG_LOCATION, else ./logs.", show_default=False),
]
