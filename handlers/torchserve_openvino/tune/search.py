"""Chooses among a few candidates by measuring them in turns, until the rest is shown to be worse or the budget ends."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np

from torchserve_openvino.bench.statistics import Interval, contrasts

C = TypeVar("C")

# Of the intervals that decide. A wrong choice between neighbors costs little, a round of all takes minutes.
_CONFIDENCE = 0.95
_SLOWER = "slower than the best"


class RejectedError(Exception):
    """A candidate that leaves the search whatever its speed.

    Args:
        reason: Why.
        excess: How many times a limit it took, where it failed by a limit.
    """

    def __init__(self, reason: str, excess: float = math.inf) -> None:
        super().__init__(reason)
        self.excess = excess


@dataclass
class Standing(Generic[C]):
    """A candidate and what is known of it.

    Attributes:
        candidate: The configuration.
        scores: The score of each round, higher is better; NaN where it was not measured.
        left: Why it left the search; empty while it is in.
        ratio: Its score relative to the winner's, with an interval; None before two rounds.
        excess: How many times a limit it took, where it left by a limit.
        rejected: Whether it left whatever its speed: what it reached before says nothing about others.
    """

    candidate: C
    scores: list[float] = field(default_factory=list)
    left: str = ""
    ratio: Interval | None = None
    excess: float = math.inf
    rejected: bool = False

    @property
    def score(self) -> float:
        """The median of its scores; NaN without any."""
        known = [score for score in self.scores if math.isfinite(score)]
        return float(np.median(known)) if known else math.nan


@dataclass(frozen=True)
class SearchResult(Generic[C]):
    """The result of a search.

    Attributes:
        standings: All candidates, in the order in which they came; the present one is the first.
        best: The winner: the present candidate unless another one is better beyond the interval.
        reason: Why this one, in a sentence.
        trials: Measurements made.
    """

    standings: list[Standing[C]]
    best: Standing[C] | None
    reason: str
    trials: int

    def without_winner(self, why: str) -> "SearchResult[C]":
        """Returns the result if the winner can't serve after all: the present candidate stays, where it can.

        Args:
            why: Why it can't, in a sentence.
        """
        present = self.standings[0]
        if self.best is present:
            return self
        reason = f"the winner could not serve when it was started once more: {why}"
        if present.rejected or not present.score > 0:
            return replace(self, best=None, reason=f"{reason}; the present configuration is out: {present.left}")
        return replace(self, best=present, reason=f"{reason}; the present configuration stays")


@dataclass
class Search(Generic[C]):
    """Measures candidates in rounds of random order; halves their number by rank, and drops those that are worse.

    Each round measures all candidates that are left, the present one included, within the same minutes. A candidate
    leaves where its confidence interval lies below the best one's, and the lower half leaves after each of the first
    rounds (successive halving: Karnin, Koren, Somekh 2013), so that the budget is spent where it decides.

    Args:
        measure: Returns a candidate's score, higher is better, 0 if it can't serve.
        budget: Most measurements.
        rng: Draws the order within each round.
        tick: Is called after each measurement.
        smallest_gain: The least relative gain for which the present configuration is changed.
        may_continue: Whether another round may begin; the first two always do.
    """

    measure: Callable[[C], float]
    budget: int
    rng: random.Random
    tick: Callable[[list[Standing[C]]], None] = lambda standings: None
    smallest_gain: float = 0.02
    may_continue: Callable[[], bool] = lambda: True
    trials: int = 0
    standings: list[Standing[C]] = field(default_factory=list)

    def run(self, present: C, others: Sequence[C]) -> SearchResult[C]:
        """Runs the search.

        Args:
            present: The configuration in use; it takes part in each round.
            others: Further candidates, the most promising ones first.
        """
        standings = self.standings = [Standing(candidate) for candidate in (present, *others)]
        racing = list(standings)
        rounds = 0
        while self._affordable(racing, rounds):
            for standing in self.rng.sample(racing, len(racing)):
                self._measure(standing, rounds)
                self.tick(standings)
            rounds += 1
            if any(standing.rejected for standing in racing):
                _return_slower(standings)
            racing = [standing for standing in standings if not standing.left]
            if rounds >= 2:
                self._drop_worse(standings, rounds)
            self._halve(standings[0], racing, rounds)
            racing = [standing for standing in racing if not standing.left]
            # Without a rival, further rounds of the present one say nothing.
            if len(racing) < 2:
                break
        return self._choose(standings, rounds)

    def so_far(self) -> SearchResult[C]:
        """Returns the choice by what is known when the search was interrupted, incomplete rounds included."""
        rounds = max((len(standing.scores) for standing in self.standings), default=0)
        if any(standing.rejected for standing in self.standings):
            _return_slower(self.standings)
        if rounds >= 2:
            self._drop_worse(self.standings, rounds)
        return self._choose(self.standings, rounds)

    def _affordable(self, racing: Sequence[Standing[C]], rounds: int) -> bool:
        if rounds >= 2 and not self.may_continue():
            return False
        return bool(racing) and (self.trials + len(racing) <= self.budget or not rounds)

    def _measure(self, standing: Standing[C], rounds: int) -> None:
        standing.scores += [math.nan] * (rounds - len(standing.scores))
        self.trials += 1
        try:
            score = self.measure(standing.candidate)
        except RejectedError as error:
            standing.left, standing.rejected, standing.excess = str(error), True, error.excess
            return
        if score <= 0:
            standing.left, standing.rejected = "no rate at which the limit holds", True
            return
        standing.scores.append(score)

    def _drop_worse(self, standings: Sequence[Standing[C]], rounds: int) -> None:
        able = _able(standings)
        if len(able) < 2:
            return
        for standing, ratio in zip(able, contrasts(_table(able, rounds), _CONFIDENCE), strict=True):
            standing.ratio = ratio
            if ratio.high < 1 and not standing.left:
                standing.left = f"{_SLOWER}: {ratio}"

    def _halve(self, present: Standing[C], racing: Sequence[Standing[C]], rounds: int) -> None:
        """Drops the lower half as long as the budget does not allow three more rounds of all."""
        left = [standing for standing in racing if not standing.left]
        while len(left) > 2 and self.trials + 3 * len(left) > self.budget:
            ranked = sorted(left, key=lambda standing: standing.score, reverse=True)
            keep = ranked[: max(2, (len(ranked) + 1) // 2)]
            for standing in ranked:
                if standing not in keep and standing is not present:
                    standing.left = f"in the lower half after {rounds} rounds"
            shorter = [standing for standing in left if not standing.left]
            if len(shorter) == len(left):
                break
            left = shorter

    def _choose(self, standings: list[Standing[C]], rounds: int) -> SearchResult[C]:
        present = standings[0]
        able = _able(standings)
        if not able:
            return SearchResult(standings, None, _none_serves(standings), self.trials)
        if present in able and rounds < 2:
            return SearchResult(
                standings, present, "nothing better than the present configuration was found", self.trials
            )
        finalists = [standing for standing in able if not standing.left or standing is present]
        # Those that were left behind serve, too, where each finalist was rejected later.
        best = max(finalists or able, key=_ratio_or_score)
        if present not in able and not present.left:
            # Interrupted: nothing can be better than what was not measured.
            reason = "the search was interrupted before the present configuration was measured, which stays"
            return SearchResult(standings, present, reason, self.trials)
        if present not in able:
            return SearchResult(standings, best, f"the present configuration is out: {present.left}", self.trials)
        if best is present or present.ratio is None or best.ratio is None:
            return SearchResult(
                standings, present, "nothing better than the present configuration was found", self.trials
            )
        if present.ratio.high >= 1 or present.ratio.value * (1 + self.smallest_gain) > best.ratio.value:
            reason = "nothing is better than the present configuration beyond the interval"
            return SearchResult(standings, present, reason, self.trials)
        bounds = (present.ratio.value, present.ratio.high, present.ratio.low)
        gain = Interval(*(best.ratio.value / bound for bound in bounds))
        return SearchResult(standings, best, f"better than the present configuration: {gain} times", self.trials)


def _able(standings: Sequence[Standing[C]]) -> list[Standing[C]]:
    return [standing for standing in standings if math.isfinite(standing.score) and not standing.rejected]


def _return_slower(standings: Sequence[Standing[C]]) -> None:
    """Takes back those that were slower than the best: it may have been the one that is out by now."""
    for standing in standings:
        if standing.left.startswith(_SLOWER):
            standing.left = ""


def _none_serves(standings: Sequence[Standing[C]]) -> str:
    """Returns that there is no candidate, and which one came nearest to the limit that it broke."""
    reason = "no candidate serves the requests within the limits"
    tried = [standing for standing in standings if standing.left]
    if not tried:
        return "the search was interrupted before any candidate was measured"
    nearest = min(tried, key=lambda trial: trial.excess)
    kind = "the nearest is" if math.isfinite(nearest.excess) else "for example"
    return f"{reason}; {kind} {nearest.candidate}: {nearest.left}"


def _ratio_or_score(standing: Standing[C]) -> float:
    """Ranks by the ratio, from which the effect of slow minutes is removed."""
    return standing.ratio.value if standing.ratio is not None else standing.score


def _table(standings: Sequence[Standing[C]], rounds: int) -> np.ndarray:
    """Returns ``[rounds, candidates]`` logarithms of the scores, NaN where there is none."""
    table = np.full((rounds, len(standings)), np.nan)
    for column, standing in enumerate(standings):
        scores = np.asarray(standing.scores[:rounds])
        table[: len(scores), column] = np.log(scores)
    return table
