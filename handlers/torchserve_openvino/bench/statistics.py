"""What measured latencies and rates allow to say, and how certain it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

# Of every claim and interval of this module.
CONFIDENCE = 0.99


@dataclass(frozen=True)
class QuantileClaim:
    """Whether a quantile of the latency is shown to lie below a limit.

    Attributes:
        shown: Whether the requests suffice.
        requests: Requests that were sent.
        late: Requests later than the limit, failed ones included.
        needed: Requests that a claim needs with this many late ones.
        quantile: The share that must not be late: 0.99 for a p99.
    """

    shown: bool
    requests: int
    late: int
    needed: int
    quantile: float

    def __str__(self) -> str:
        name = f"p{self.quantile * 100:g}"
        if self.shown:
            return f"{name} shown with {self.requests} requests, {self.late} late"
        return f"{name} not shown: {self.requests} of {self.needed} requests, {self.late} late"


def claim_quantile(requests: int, late: int, quantile: float = 0.99, confidence: float = CONFIDENCE) -> QuantileClaim:
    """Tests whether at least ``quantile`` of all requests are in time.

    The exact binomial test of MLPerf's server scenario: if a share ``1 - quantile`` of all requests were late, then so
    few late ones among so many would have a probability of at most ``1 - confidence``.

    Args:
        requests: Requests that were sent, at least ``late``.
        late: Those above the limit, failed ones included.
        quantile: The share that has to be in time.
        confidence: Of the claim.

    Raises:
        ValueError: ``late`` is negative or above ``requests``.
    """
    if not 0 <= late <= requests:
        raise ValueError(f"late must be between 0 and {requests} requests, not {late}")
    needed = requests_needed(late, quantile, confidence)
    return QuantileClaim(requests >= needed, requests, late, needed, quantile)


def requests_needed(late: int, quantile: float = 0.99, confidence: float = CONFIDENCE) -> int:
    """Returns the fewest requests with which a quantile can be claimed although ``late`` of them are late."""
    limit, share = 1.0 - confidence, 1.0 - quantile
    low, high = late, max(1, late)
    while float(stats.binom.cdf(late, high, share)) > limit:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if float(stats.binom.cdf(late, middle, share)) > limit else (low, middle)
    return high


@dataclass(frozen=True)
class Interval:
    """A value with its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def contrasts(rounds: np.ndarray, confidence: float = CONFIDENCE) -> list[Interval]:
    """Compares each contender of an interleaved measurement with the best one.

    A round measures all contenders one after another, so that a fast or slow minute of the machine affects all of
    them: its effect is removed. The noise is pooled over contenders, since few rounds say little about a single one
    (two-way analysis of variance; the interval is that of the difference of two means, Student's t).

    Args:
        rounds: ``[rounds, contenders]`` logarithms of what is compared; at least 2 of each. NaN: not measured.
        confidence: Of each interval.

    Returns:
        For each contender, its ratio to the best one (at most 1) with its interval. The best one has 1, 1, 1.

    Raises:
        ValueError: There are fewer than 2 rounds, or nothing was measured.
    """
    count, contenders = rounds.shape
    if count < 2 or not np.isfinite(rounds).any():
        raise ValueError(f"a comparison needs at least 2 rounds with results, not {count}")
    # Effects of rounds and contenders in turns until both are removed: cells may be missing.
    effects = np.nanmean(rounds, axis=0)
    for _ in range(50):
        turns = np.nanmean(rounds - effects, axis=1)
        effects = np.nanmean(rounds - turns[:, None], axis=0)
    rest = rounds - effects - np.nanmean(rounds - effects, axis=1)[:, None]
    cells = int(np.isfinite(rest).sum())
    freedom = cells - count - contenders + 1
    # Without repeated measurements nothing is known of the noise.
    spread = math.sqrt(float(np.nansum(rest**2)) / freedom) if freedom > 0 else math.inf
    factor = float(stats.t.ppf(0.5 + confidence / 2, max(1, freedom)))
    best = int(np.nanargmax(effects))
    seen = np.isfinite(rounds).sum(axis=0)
    result = []
    for contender in range(contenders):
        difference = float(effects[contender] - effects[best])
        width = factor * spread * math.sqrt(1 / seen[contender] + 1 / seen[best]) if contender != best else 0.0
        result.append(Interval(math.exp(difference), math.exp(difference - width), math.exp(difference + width)))
    return result


def grows(waiting: Sequence[float], seconds: Sequence[float], confidence: float = CONFIDENCE) -> bool:
    """Returns True if a queue grows: latencies rise with the time at which their requests were due.

    Kendall's tau makes no assumption about the shape of latencies, and a single slow request does not decide.

    Args:
        waiting: Latencies, in the order of their requests.
        seconds: When each request was due.
        confidence: Of the test.
    """
    if len(waiting) < 20:
        return False
    # Neighbors share a queue: means of blocks are nearly independent.
    blocks = np.array_split(np.argsort(np.asarray(seconds)), 20)
    means = [float(np.mean(np.asarray(waiting)[block])) for block in blocks]
    rank = stats.kendalltau(range(len(means)), means)
    doubled = np.mean(means[-5:]) > 1.5 * np.mean(means[:5])
    return bool(rank.statistic > 0 and rank.pvalue < 1 - confidence and doubled)
