"""What each key does, all else equal: comparisons with the choice that differ in one respect."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torchserve_openvino.tune.candidates import Candidate, ComputeSettings
from torchserve_openvino.tune.search import SearchResult, Standing

_KEYS = {"batch_size": "batchSize", "delay_ms": "maxBatchDelay", "streams": "execution.streams", "options": "keys"}


def effects_of(
    choice: SearchResult[Candidate], present: Candidate, times: dict[ComputeSettings, dict[int, float]]
) -> list[dict[str, Any]]:
    """Returns how many times as fast single keys make the choice, or the present configuration where none was made.

    Args:
        choice: Result of the search.
        present: The configuration of the archive.
        times: Milliseconds of a call by batch size, for each way to compute.

    Returns:
        For each comparison the `key`, its `value`, the `base` value in the choice, how many `times` as fast the
        choice becomes by the value, and what was `measured`. JSON-safe.
    """
    base = choice.best.candidate if choice.best is not None else present
    engines = _of_engines(base.engine, times)
    return sorted(
        [*engines, *_of_servers(base, choice.standings)], key=lambda effect: (effect["key"], effect["measured"])
    )


def _of_engines(base: ComputeSettings, times: dict[ComputeSettings, dict[int, float]]) -> Iterator[dict[str, Any]]:
    for engine, by_size in times.items():
        name, sizes = _only_difference(base, engine), by_size.keys() & times.get(base, {}).keys()
        if name and sizes:
            ratio = math.exp(statistics.fmean(math.log(times[base][size] / by_size[size]) for size in sizes))
            yield _effect(name, base, engine, ratio, "calls in one process")


def _of_servers(base: Candidate, standings: list[Standing[Candidate]]) -> Iterator[dict[str, Any]]:
    best = next((standing for standing in standings if standing.candidate == base), None)
    for standing in standings:
        name = _only_difference(base, standing.candidate)
        if name and name != "engine" and best is not None and standing.ratio and best.ratio:
            ratio = standing.ratio.value / best.ratio.value
            yield _effect(name, base, standing.candidate, ratio, "real servers")


def _effect(name: str, base: Any, other: Any, ratio: float, measured: str) -> dict[str, Any]:
    values = [_shown(getattr(candidate, name)) for candidate in (base, other)]
    return {
        "key": _KEYS.get(name, name), "base": values[0], "value": values[1], "times": round(ratio, 3),
        "measured": measured,
    }  # fmt: skip


def _only_difference(base: Any, other: Any) -> str:
    """Returns the only field in which two of a kind differ; empty if there is none, or more than one."""
    assert is_dataclass(base)
    names = [field.name for field in fields(base) if getattr(base, field.name) != getattr(other, field.name)]
    return names[0] if len(names) == 1 else ""


def _shown(value: Any) -> str:
    return "; ".join(map(str, value)) or "as they were" if isinstance(value, tuple) else str(value)
