"""Interleaved timing: contenders run in turns in one process, so that a change in the machine's speed affects all."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Call = Callable[[], object]
# A shorter call is repeated until one measurement takes this long.
_LEAST_SECONDS = 0.02


@dataclass(frozen=True)
class Times:
    """What each turn took.

    Attributes:
        milliseconds: For each contender one value per turn; values at the same position were measured in the same turn.
    """

    milliseconds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        """Milliseconds."""
        return statistics.median(self.milliseconds[name])

    def deciles(self, name: str) -> tuple[float, float]:
        """The 10th and 90th percentile, in milliseconds."""
        cuts = statistics.quantiles(self.milliseconds[name], n=10)
        return cuts[0], cuts[-1]

    def ratio(self, name: str, base: str) -> float | None:
        """Median over the turns of one contender's time divided by another's; None if either was not measured."""
        pairs = self._pairs(name, base)
        return statistics.median(a / b for a, b in pairs) if pairs else None

    def above(self, name: str, base: str) -> float | None:
        """Median over the turns of one contender's time minus another's, in milliseconds; None as for `ratio`."""
        pairs = self._pairs(name, base)
        return statistics.median(a - b for a, b in pairs) if pairs else None

    def _pairs(self, name: str, base: str) -> list[tuple[float, float]]:
        return list(zip(self.milliseconds.get(name, []), self.milliseconds.get(base, []), strict=False))


def interleave(
    calls: Mapping[str, Call],
    turns: int,
    warmup: int = 0,
    repeats: Mapping[str, int] | None = None,
    before: Mapping[str, Call] | None = None,
) -> Times:
    """Times contenders in turns, in a different order each turn.

    torch's threads keep spinning for a while after a call, which slows the next contender; a changing order spreads
    this cost over all.

    Args:
        calls: Contenders by name.
        turns: Measured turns.
        warmup: Turns before them.
        repeats: Calls per measurement, by name; default 1.
        before: What comes before each measurement and is not measured, by name.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    shuffled = random.Random(0)
    for turn in range(warmup + turns):
        for name in shuffled.sample(list(calls), len(calls)):
            if before is not None:
                before[name]()
            took = seconds(calls[name], (repeats or {}).get(name, 1))
            if turn >= warmup:
                times[name].append(took * 1e3)
    return Times(times)


def seconds(call: Call, repeats: int = 1) -> float:
    """Time of one call, as the mean of several in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of sorted values.

    Args:
        ordered: At least one.
        share: Above 0, at most 1.
    """
    return ordered[math.ceil(share * len(ordered)) - 1]


def enough_repeats(calls: Mapping[str, Call]) -> dict[str, int]:
    """Returns how many calls of each contender make a measurement long enough."""
    return {name: max(1, int(_LEAST_SECONDS / seconds(call, 3))) for name, call in calls.items()}
