"""The printed tables: one row for each contender and load, medians over the rounds, and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from benchmarks import output
from benchmarks.servers import contenders
from benchmarks.servers.cycle import Result, errors
from benchmarks.servers.load import Load

BASES = {
    contenders.EAGER: "ours / eager",
    contenders.TUNED: "ours / eager, tuned",
    contenders.INDUCTOR: "ours / inductor",
    contenders.LITSERVE: "ours / litserve",
}


def median(result: Result, load: Load, key: str) -> float | None:
    """Median of one figure over the rounds that have it."""
    values = [one[key] for one in result.figures.get(load, []) if one[key] is not None]
    return statistics.median(values) if values else None


def loads_of(results: Sequence[Result]) -> list[Load]:
    """All loads of any contender, closed loop first, ascending."""
    return sorted({one for result in results for one in result.figures}, key=lambda one: (one.kind, one.level))


def _total(result: Result, load: Load, count: Callable[[dict[str, Any]], int]) -> str:
    return str(sum(count(one) for one in result.figures[load]))


def loads(results: Sequence[Result], title: str) -> Table:
    """Throughput, latency, errors and processor time; `other cores` is what other processes used meanwhile."""
    table = Table(title=title)
    for name in ("load", "contender"):
        table.add_column(name, no_wrap=True)
    for name in (
        "requests/s",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "CPU ms/request",
        "other cores",
        "wrong",
        "failed",
        "dropped",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for load in loads_of(results):
        table.add_section()
        rows = [result for result in results if load in result.figures]
        for position, result in enumerate(rows):
            table.add_row(
                "" if position else str(load),
                result.name,
                *(output.number(median(result, load, key), ".1f") for key in ("rate", "p50", "p90", "p99", "cpu_ms")),
                output.number(median(result, load, "other_cores"), ".2f"),
                _total(result, load, lambda one: one["wrong"]),
                _total(result, load, lambda one: errors(one) - one["wrong"]),
                _total(result, load, lambda one: one["dropped"]),
            )
    return table


def processes(results: Sequence[Result]) -> Table:
    """Memory and start time of each contender."""
    table = Table(title="processes, after the last load")
    table.add_column("contender", no_wrap=True)
    for name in ("start s", "workers", "RSS MB of each worker", "USS MB of each worker", "RSS MB of all processes"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        if not result.start_seconds:
            continue
        table.add_row(
            result.name,
            output.number(statistics.median(result.start_seconds), ".0f"),
            str(len(result.memory)),
            ", ".join(output.number(one.rss, ".0f") for one in result.memory),
            ", ".join(output.number(one.uss, ".0f") for one in result.memory),
            output.number(result.tree_rss, ".0f"),
        )
    return table


def absent(results: Sequence[Result]) -> list[str]:
    """One line for each contender that was skipped or failed; the whole message was printed when it happened."""
    lines = []
    for result in results:
        if result.skipped:
            lines.append(f"{result.name}: skipped, {result.skipped}")
        elif result.failed:
            lines.append(f"{result.name}: failed, {result.failed.splitlines()[0]}")
    return lines


def ratios(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Our throughput over each other contender's in the same round, median over the rounds: title -> load -> ratio."""
    by_name = {result.name: result for result in results}
    ours = by_name.get(contenders.OURS)
    answer: dict[str, dict[str, float]] = {}
    for base, title in BASES.items():
        other = by_name.get(base)
        if ours is None or other is None:
            continue
        for load in loads_of(results):
            pairs = zip(ours.figures.get(load, []), other.figures.get(load, []), strict=False)
            values = [mine["rate"] / its["rate"] for mine, its in pairs if its["rate"]]
            # In the open loop all have the same throughput until they saturate.
            if values and load.kind == "closed":
                answer.setdefault(title, {})[str(load)] = statistics.median(values)
    return answer


def ratio_table(results: Sequence[Result]) -> Table | None:
    """The ratios as a table; None without `ours` and another contender."""
    values = ratios(results)
    if not values:
        return None
    table = Table(title="throughput, closed loop")
    table.add_column("load", no_wrap=True)
    for title in values:
        table.add_column(title, justify="right", no_wrap=True)
    for load in [str(one) for one in loads_of(results) if one.kind == "closed"]:
        table.add_row(load, *(output.number(column.get(load), ".2f") for column in values.values()))
    return table
