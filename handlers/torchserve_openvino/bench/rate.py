"""Finds the highest rate of requests at which a limit of the latency holds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scipy.optimize import isotonic_regression

# The search ends where the interval is narrower than this: repeated windows differ more.
_WIDTH = 1.08


class Window(Protocol):
    """One measured window, as `RateSearch` reads it."""

    @property
    def held(self) -> bool:
        """Whether the limit held, no request failed, and the queue did not grow."""

    @property
    def disturbed(self) -> str:
        """Why the window does not count; empty if it does."""


@dataclass
class RateSearch:
    """The search for one server's highest rate.

    Args:
        measure: Sends requests at a rate (requests/s) and returns what happened.
        start: The first rate, from a model of the server, in requests/s.
        windows: Most windows to measure, disturbed ones not counted.
        repeats: How often a disturbed window is measured again.

    Attributes:
        history: Each rate with its window, in the order of time.
    """

    measure: Callable[[float], Window]
    start: float
    windows: int = 8
    repeats: int = 2
    history: list[tuple[float, Window]] = field(default_factory=list)

    def run(self) -> float:
        """Returns the highest rate that held, 0 if none did.

        Doubles or halves the rate until one held and one did not, halves the interval between them, and then fits
        a monotone function to all windows: one lucky or unlucky window is outvoted by its neighbors.
        """
        good, bad, rate = 0.0, math.inf, self.start
        for _ in range(self.windows):
            if self._held(rate):
                good = max(good, rate)
            else:
                bad = min(bad, rate)
            if bad <= good:
                # A window contradicts an earlier one: measure between them again.
                good, bad = bad / math.sqrt(2), good * math.sqrt(2)
            if math.isinf(bad):
                rate = good * 2
            elif not good:
                rate = bad / 2
            elif bad / good < _WIDTH:
                break
            else:
                rate = math.sqrt(good * bad)
        quiet = [(rate, window.held) for rate, window in self.history if not window.disturbed]
        # On a machine that is never quiet, disturbed windows are all there is.
        return highest_held(quiet or [(rate, window.held) for rate, window in self.history])

    def _held(self, rate: float) -> bool:
        for _ in range(1 + self.repeats):
            window = self.measure(rate)
            self.history.append((rate, window))
            if not window.disturbed:
                break
        return window.held


def highest_held(outcomes: Sequence[tuple[float, bool]]) -> float:
    """Returns the highest rate that holds by a monotone fit of outcomes, 0 if none does.

    Isotonic regression makes the share of windows that held a falling function of the rate; the result is the
    highest measured rate where it is at least one half and a window held.

    Args:
        outcomes: Rates in requests/s, and whether the limit held at each.
    """
    if not outcomes:
        return 0.0
    ordered = sorted(outcomes)
    fit = isotonic_regression([float(held) for _, held in ordered], increasing=False).x
    fits = [rate for (rate, held), share in zip(ordered, fit, strict=True) if held and share >= 0.5]
    return max(fits, default=0.0)


def confirmed(rate: float, measure: Callable[[float], Window], runs: int = 5, lower_by: float = 0.93) -> float:
    """Measures a rate several times, and lowers it at each failure until all runs hold.

    Args:
        rate: Requests/s; 0 stays 0.
        measure: As in `RateSearch`.
        runs: Consecutive runs that must hold.
        lower_by: Factor of the rate after a failure.

    Returns:
        The rate that held in all runs; 0 where it fell below a tenth of the first one.
    """
    lowest = rate / 10
    while rate > lowest > 0:
        if all(_undisturbed(measure, rate).held for _ in range(runs)):
            return rate
        rate *= lower_by
    return 0.0


def _undisturbed(measure: Callable[[float], Window], rate: float, repeats: int = 2) -> Window:
    for _ in range(repeats):
        window = measure(rate)
        if not window.disturbed:
            return window
    return measure(rate)
