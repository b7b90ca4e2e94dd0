"""The printed table of the servers, and notes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks import output
from benchmarks.startups.rounds import OURS_COLD, OURS_WARM
from benchmarks.startups.serve import EAGER, PACKAGED, TWO, Served


def median(result: Served | None, key: str) -> float | None:
    """Median of one figure over the rounds."""
    values = [one[key] for one in result.rounds if key in one] if result is not None else []
    return statistics.median(values) if values else None


def ratio(result: Served | None, base: Served | None, key: str = "ready") -> float | None:
    """Ratio of one figure within the same round, median."""
    if result is None or base is None:
        return None
    values = [a[key] / b[key] for a, b in zip(result.rounds, base.rounds, strict=False)]
    return statistics.median(values) if values else None


def table(results: Sequence[Served]) -> Table:
    """Seconds to READY and to the answer, and what the workers traced and compiled."""
    count = max((len(one.rounds) for one in results), default=0)
    shown = Table(
        title=f"TorchServe, EfficientNet-Lite0, {f'medians of {count} rounds' if count > 1 else '1 round'}, seconds"
    )
    shown.add_column("contender", no_wrap=True)
    for name in ("register to READY", "x eager", "READY to answer", "traces/compiles of each worker", "second worker"):
        shown.add_column(name, justify="right")
    base = next((one for one in results if one.contender == EAGER), None)
    for one in results:
        if not one.rounds:
            shown.add_row(one.contender, "skipped" if one.skipped else "failed")
            continue
        wrong = any(turn["wrong"] for turn in one.rounds)
        shown.add_row(
            one.contender,
            output.number(median(one, "ready")),
            output.number(ratio(one, base)),
            "wrong" if wrong else output.number(median(one, "answer")),
            ", ".join(f"{s['traces']}/{s['compiles']}" for s in sections(one)),
            output.number(median(one, "scaled")),
        )
    return shown


def sections(result: Served) -> list[dict[str, Any]]:
    """Cache sections of the last round's workers; the busiest first."""
    workers = result.rounds[-1].get("workers", {}).values() if result.rounds else ()
    return sorted(workers, key=lambda one: one["traces"] + one["compiles"], reverse=True)


def notes(results: Sequence[Served]) -> list[str]:
    """Ratios, and what does not fit into the table."""
    lines = [f"{one.contender}: skipped, {one.skipped}" for one in results if one.skipped]
    lines += [f"{one.contender}: failed, {one.failed.splitlines()[0]}" for one in results if one.failed]
    named = {one.contender: one for one in results}
    for name in (OURS_WARM, PACKAGED):
        if (value := ratio(named.get(OURS_COLD), named.get(name))) is not None:
            lines.append(f"register to READY, ours-cold / {name}: {value:.2f}")
    return [*lines, *(f"{one.contender}: {text}" for one in results for text in faults(one))]


def faults(result: Served) -> list[str]:
    """Describes workers that traced or compiled needlessly, or did not report."""
    rows = []
    for number, turn in enumerate(result.rounds, 1):
        workers = turn.get("workers", {})
        if not workers:
            continue
        # Where two start cold, one does the work for both.
        allowed = int(result.contender in {OURS_COLD, TWO})
        busy = {pid: one for pid, one in workers.items() if one["traces"] or one["compiles"]}
        if len(busy) > allowed:
            what = ", ".join(f"{pid}: {one['traces']} traces, {one['compiles']} compiles" for pid, one in busy.items())
            rows.append(f"round {number}: {what}; at most {allowed} worker(s) should have any")
        expected = 2 if result.contender in {OURS_COLD, TWO} else 1
        if len(workers) != expected:
            rows.append(f"round {number}: {len(workers)} of {expected} workers described themselves")
    return rows


def problem(results: Sequence[Served]) -> bool:
    """Whether ours failed, answered wrong, or did work twice."""
    ours = [one for one in results if one.contender.startswith("ours") or one.contender == PACKAGED]
    wrong = any(turn["wrong"] for one in ours for turn in one.rounds)
    return wrong or any(one.failed or faults(one) for one in ours)
