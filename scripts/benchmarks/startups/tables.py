"""The printed table: medians over the rounds, and ratios within the same round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks import output
from benchmarks.startups.models import SOURCES
from benchmarks.startups.rounds import BARE, OURS_COLD, OURS_WARM, Result

# In chronological order.
PHASES = (
    "interpreter",
    "imports",
    "model",
    "key",
    "trace",
    "lower",
    "convert",
    "compile",
    "store",
    "load",
    "proof",
    "first call",
)


def total(result: Result) -> float | None:
    """Median seconds from the start of the process to the first answer."""
    return statistics.median(one["total"] for one in result.rounds) if result.rounds else None


def phases(result: Result) -> dict[str, float]:
    """Median seconds of each phase; in one round they add up to its total, medians need not."""
    names = {name for one in result.rounds for name in one["phases"]}
    return {name: statistics.median(one["phases"].get(name, 0.0) for one in result.rounds) for name in names}


def ratio(result: Result, base: Result | None) -> float | None:
    """Ratio of the totals within the same round, median."""
    if base is None:
        return None
    values = [a["total"] / b["total"] for a, b in zip(result.rounds, base.rounds, strict=False)]
    return statistics.median(values) if values else None


def bare(results: Sequence[Result]) -> Result | None:
    """The faster of the two forms of raw OpenVINO that answer right."""
    references = [one for one in results if one.contender in BARE and one.rounds and not one.wrong]
    return min(references, key=lambda one: total(one) or 0.0, default=None)


def process_table(results: Sequence[Result]) -> Table:
    """One model: seconds by phase, ratios to `bare`, and the difference from eager's answer."""
    base = bare(results)
    shown = [name for name in PHASES if any(phases(result).get(name, 0.0) >= 0.005 for result in results)]
    title = f"{SOURCES[results[0].model].title}: start of the process to the first answer, seconds"
    count = max((len(result.rounds) for result in results), default=0)
    table = Table(title=f"{title}, {f'medians of {count} rounds' if count > 1 else '1 round'}")
    table.add_column("contender", no_wrap=True)
    for name in ("total", f"x {base.contender}" if base else "x bare", *shown, "max |diff|", "traced", "compiled"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        seconds = total(result)
        if seconds is None:
            table.add_row(result.contender, "failed")
            continue
        own = phases(result)
        cache = result.cache
        table.add_row(
            result.contender,
            f"{seconds:.2f}",
            output.number(ratio(result, base)),
            *(output.number(own.get(name)) for name in shown),
            answer(result),
            *(str(cache[key]) if cache else "" for key in ("traces", "compiles")),
        )
    return table


def answer(result: Result) -> str:
    """Greatest difference from eager's answer, or what is wrong with it."""
    if result.wrong:
        return "wrong"
    if any("stand_in" in one["facts"] for one in result.rounds):
        return "by PyTorch"
    return f"{max(one['difference'] for one in result.rounds):.1g}"


def notes(results: Sequence[Result]) -> list[str]:
    """What does not fit into the table."""
    lines = [f"{one.contender}: failed, {_reason(one.failed)}" for one in results if one.failed]
    lines += [f"{one.contender}: {one.note}" for one in results if one.note]
    for one in results:
        if one.contender.startswith(OURS_WARM) and one.cache and one.cache["status"] != "hit":
            lines.append(f"{one.contender}: the cache was no hit but {one.cache['status']}: {why_missed(one.cache)}")
    named = {one.contender: one for one in results}
    cold, warm = named.get(OURS_COLD), named.get(OURS_WARM)
    if cold is not None and warm is not None and (value := ratio(cold, warm)) is not None:
        lines.append(f"ours-cold / ours-warm: {value:.2f}")
    source = SOURCES[results[0].model]
    return [*lines, f"{results[0].model}: {source.note}"] if source.note else lines


def why_missed(cache: dict[str, Any]) -> str:
    """The fields in which the nearest entry differs, and what was refused."""
    parts = [f"{name} differs" for name in cache["nearest"]] + [
        f"{name} ({n} x)" for name, n in cache["refused"].items()
    ]
    return "; ".join(parts) or "it was empty"


def _reason(text: str) -> str:
    """Python's last line, or the signal."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if len(lines) > 1 and lines[-1].startswith("exit code"):
        return lines[-2]
    return lines[-1] if lines else "without a word"


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """All figures of one model."""
    base = bare(results)
    contenders = [
        {**vars(one), "total": total(one), "phases": phases(one), "over_bare": ratio(one, base), "wrong": one.wrong}
        for one in results
    ]
    return {"model": results[0].model, "bare": base.contender if base else None, "contenders": contenders}


def problem(results: Sequence[Result]) -> bool:
    """Whether ours failed, answered wrong, or was traced or compiled with a warm cache."""
    ours = [one for one in results if one.contender.startswith("ours")]
    warm = [one for one in ours if one.contender.startswith(OURS_WARM) and one.cache]
    return any(one.failed or one.wrong for one in ours) or any(one.cache["status"] != "hit" for one in warm)
