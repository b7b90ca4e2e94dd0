"""Throughput as bars, latency as curves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.servers.cycle import Result
from benchmarks.servers.tables import loads_of, median

COLORS = ("#888888", "#d08020", "#1060c0", "#20a060", "#903090")


def draw(results: Sequence[Result], path: Path) -> None:
    """Draws a picture; the file's suffix chooses the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(one, color) for one, color in zip(results, itertools.cycle(COLORS), strict=False) if one.figures]
    figure, (bars, closed, opened) = pyplot.subplots(1, 3, figsize=(16, 5), layout="constrained")
    _bars(bars, shown)
    _curves(closed, shown, "closed", "clients")
    _curves(opened, shown, "open", "requests/s that arrive")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(axes: Any, shown: Sequence[tuple[Result, str]]) -> None:
    loads = [one for one in loads_of([result for result, _ in shown]) if one.kind == "closed"]
    width = 0.8 / max(1, len(shown))
    for position, (result, color) in enumerate(shown):
        places = [index + (position - (len(shown) - 1) / 2) * width for index in range(len(loads))]
        heights = [median(result, load, "rate") or 0.0 for load in loads]
        drawn = axes.bar(places, heights, width, label=result.name, color=color)
        axes.bar_label(drawn, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(loads)), [f"{load.level:.0f}" for load in loads])
    axes.set(title="throughput, closed loop", xlabel="clients", ylabel="requests/s")
    axes.legend()


def _curves(axes: Any, shown: Sequence[tuple[Result, str]], kind: str, label: str) -> None:
    for result, color in shown:
        loads = [one for one in loads_of([result]) if one.kind == kind]
        for key, style in (("p50", "-"), ("p99", "--")):
            points = [(one.level, value) for one in loads if (value := median(result, one, key)) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, marker="o", color=color, label=f"{result.name} {key}")
    axes.set(title=f"latency, {kind} loop", xlabel=label, ylabel="ms")
    if axes.lines:
        axes.set_yscale("log")
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks("{x:.0f}")
        axes.set_xticks(sorted({float(x) for line in axes.lines for x in line.get_xdata()}))
        axes.legend(fontsize=8)
