"""Turns the measurements of a model into a diagnosis."""

import linecache
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.fx import Node

from torchserve_openvino.backend.runtime.compare import largest_difference, output_tensors
from torchserve_openvino.doctor.describe import described
from torchserve_openvino.doctor.diagnosis import Box, Break, Diagnosis, GraphPicture, OpRow, Refused
from torchserve_openvino.doctor.fixed_state import differences
from torchserve_openvino.doctor.measure import GraphRun, Measured, measure
from torchserve_openvino.doctor.next_steps import Helper, OpSample
from torchserve_openvino.doctor.rewrites import steps_for_break
from torchserve_openvino.doctor.target import Target
from torchserve_openvino.files.json_text import with_names
from torchserve_openvino.ops import does_work, op_name, where_of
from torchserve_openvino.ops.names import tensors_of, value_of
from torchserve_openvino.report.records import line_of


def diagnose(target: Target, progress: Callable[[str], None] = lambda _: None) -> Diagnosis:
    """Compiles and runs a model, and finds out what does not run on OpenVINO and what would help.

    Args:
        target: The model with its inputs and options.
        progress: Called with a short description of each step.

    Returns:
        The diagnosis. Its ``summary`` counts the graphs that a call runs; times are in milliseconds.
    """
    measured = measure(target, progress)
    progress("looking for what helps")
    report, root = measured.report, target.root
    ops = _op_rows(measured.graphs, root)
    return Diagnosis(
        model=target.name,
        inputs=[*map(described, target.call.args), *(f"{k}={described(v)}" for k, v in target.call.kwargs.items())],
        summary=_summary(measured, ops),
        comparison=_comparison(measured, target),
        report=report,
        ops=ops,
        refused=_refused(measured.graphs, ops, Helper(target), root),
        graph_breaks=[_break(entry, root) for entry in report["graph_breaks"]],
        fallbacks=[{**entry, "where": short(entry["where"], root)} for entry in report["fallbacks"]],
        decomposed=_decomposed(report),
        pictures=[_picture(graph, root) for graph in measured.graphs],
    )


# --- coverage and times -------------------------------------------------------------------------------------------


def _summary(measured: Measured, ops: Iterable[OpRow]) -> dict[str, Any]:
    summary = dict(measured.report["summary"])
    rows = list(ops)
    total, on_openvino = sum(row.count for row in rows), sum(row.on_openvino for row in rows)
    records = [record for graph in measured.graphs for record in graph.graph.record.partitions]
    summary.update(
        ops_total=total,
        ops_on_openvino=on_openvino,
        coverage=round(on_openvino / total, 6) if total else float(bool(measured.graphs)),
        graphs=len(measured.graphs),
        partitions=sum(record.runs_on == "openvino" for record in records),
        eager_ms=round(measured.eager_ms, 4),
        compiled_ms=round(measured.compiled_ms, 4),
    )
    # Graph breaks do not count, since one may be gone in the second call; fallbacks always count.
    summary["all_on_openvino"] = bool(measured.graphs) and on_openvino == total and not measured.report["fallbacks"]
    return summary


def _comparison(measured: Measured, target: Target) -> dict[str, Any]:
    """Compares the answers with eager's as a worker would, with the limits of the YAML and the task's measure."""
    precision = str(measured.report["summary"]["precision"]) or "f32"
    judge = target.judge_in(precision)
    verdicts = [
        f"raises {answer.error}" if answer.error else differences(judge, answer.got, answer.expected)
        for answer in measured.answers
    ]
    # One is enough: a wrong operator is wrong on most values.
    first, *others = verdicts
    other = next((f"with the values in reverse order: {verdict}" for verdict in others if verdict), "")
    worst = max(float("inf") if a.error else largest_difference(a.got, a.expected) for a in measured.answers)
    return {
        "verdict": first or other,
        "max_abs": with_names(worst),
        "precision": precision,
        "outputs": [described(tensor) for tensor in output_tensors(measured.answers[0].expected)],
    }


def _op_rows(graphs: Iterable[GraphRun], root: Path | None) -> list[OpRow]:
    rows: dict[str, OpRow] = {}
    for graph in graphs:
        for node in graph.graph.lowered.graph.nodes:
            if not does_work(node):
                continue
            row = rows.setdefault(op_name(node.target), OpRow(op_name(node.target)))
            row.count += 1
            row.on_openvino += graph.runs_on(node) == "openvino"
            row.eager_ms += graph.node_ms[node.name]
            _add_place(row.where, node, root)
    total = sum(row.eager_ms for row in rows.values())
    for row in rows.values():
        row.share = row.eager_ms / total if total else 0.0
    return sorted(rows.values(), key=lambda row: -row.eager_ms)


def _add_place(places: list[str], node: Node, root: Path | None) -> None:
    source = short(where_of(node), root)
    if source and source not in places:
        places.append(source)


# --- what does not run on OpenVINO ----------------------------------------------------------------------------------


def _refused(graphs: Iterable[GraphRun], ops: Iterable[OpRow], helper: Helper, root: Path | None) -> list[Refused]:
    entries: dict[tuple[str, str, str], Refused] = {}
    total = sum(row.eager_ms for row in ops)
    for graph in graphs:
        for node, left_out in graph.left_out.items():
            refusal = left_out.refusal
            key = (left_out.op, refusal.kind, refusal.reason)
            if key not in entries:
                entries[key] = _first(key, node, graph, helper)
            entry = entries[key]
            entry.count += 1
            entry.share += graph.node_ms[node.name] / total if total else 0.0
            _add_place(entry.where, node, root)
    return sorted(entries.values(), key=lambda entry: -entry.share)


def _first(key: tuple[str, str, str], node: Node, graph: GraphRun, helper: Helper) -> Refused:
    seen = graph.arguments[node.name]
    outputs = tensors_of(value_of(node))
    return Refused(
        *key,
        source=quoted(where_of(node)),
        inputs=[*map(described, seen.args), *(f"{name}={described(value)}" for name, value in seen.kwargs.items())],
        outputs=[described(tensor) for tensor in outputs],
        next_steps=helper.steps(OpSample(node.target, seen, outputs, *key[1:])),
    )


def _break(entry: Mapping[str, Any], root: Path | None) -> Break:
    source = quoted(entry["where"])
    return Break(
        entry["reason"], short(entry["where"], root), source, entry["count"], steps_for_break(entry["reason"], source)
    )


def _decomposed(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Counts which operators of torch were decomposed in all graphs, and into which ones."""
    counts: Counter[str] = Counter()
    into: dict[str, Counter[str]] = {}
    for graph in report["graphs"]:
        for op, entry in graph.get("decomposed", {}).items():
            counts[op] += entry["count"]
            into.setdefault(op, Counter()).update(entry["into"])
    return [{"op": op, "count": count, "into": dict(into[op])} for op, count in counts.most_common()]


# --- the picture ----------------------------------------------------------------------------------------------------


def _picture(run: GraphRun, root: Path | None) -> GraphPicture:
    """Makes the picture of the outer graph, without the nodes that only unpack or pass on values."""
    record, outer = run.graph.record, run.graph.partitioned.outer
    parts = {part.name: part for part in run.graph.partitioned.parts}
    picture = GraphPicture(record.index, short(record.where, root))
    total = sum(run.outer_ms.values())
    sources: dict[Node, set[str]] = {}
    for node in outer.graph.nodes:
        above = set().union(*(sources[source] for source in node.all_input_nodes))
        box = _box(node, run, parts, root)
        if box is None:
            sources[node] = above
            continue
        box.id = f"g{record.index}_{box.id}"
        box.share = box.ms / total if total else 0.0
        if all(other.id != box.id for other in picture.boxes):
            picture.boxes.append(box)
        picture.edges += [(source, box.id) for source in sorted(above)]
        sources[node] = {box.id}
    return picture


def _box(node: Node, run: GraphRun, parts: Mapping[str, Any], root: Path | None) -> Box | None:
    ms = run.outer_ms.get(node.name, 0.0)
    if node.op == "placeholder":
        # Weights are constants of their partitions: an arrow for each would obscure the data flow.
        return None if node.name in run.weights else Box("input", "inputs", "input")
    if node.op == "output":
        return Box("output", "outputs", "output")
    if node.op == "call_module":
        part = parts[str(node.target)]
        return Box(node.name, part.name, run.part_runs_on(part.name), part.ops, ms, op_counts=dict(part.op_counts))
    if not does_work(node):
        return None
    name = op_name(node.target)
    return Box(node.name, name, "eager", 1, ms, op_counts={name: 1}, where=short(where_of(node), root))


# --- quotes the user's source lines and shortens their paths ------------------------------------------------------


def split_where(where: str) -> tuple[str, int]:
    """Splits ``file:line``, optionally followed by a function's name, into path and line; line 0 if there is none."""
    path, _, line = line_of(where).rpartition(":")
    return (path, int(line)) if line.isdigit() else (where, 0)


def quoted(where: str) -> str:
    """Returns the source line at a place; empty if it cannot be read."""
    path, line = split_where(where)
    return linecache.getline(path, line).strip() if line else ""


def short(where: str, root: Path | None) -> str:
    """Makes a place relative to the model's folder or the working folder, if it lies below one of them."""
    for folder in (root, Path.cwd()):
        if folder is not None and where.startswith(f"{folder}/"):
            return where.removeprefix(f"{folder}/")
    return where
