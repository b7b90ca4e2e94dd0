"""Chooses how a batch of a size that is not compiled runs: padded to a larger one, or as several smaller calls."""

from collections import deque
from collections.abc import Hashable, Sequence
from statistics import median

# Calls of a size that have to be timed, and the latest ones that count.
_FEWEST, _LATEST = 5, 9
# Several calls have to save this part of the padded call's time.
_GAIN = 0.1
# Most shapes whose calls are timed.
_SHAPES = 256


class CallCosts:
    """Times of calls by batch size.

    Three rows padded to four cost a model that computes much a third more than it needs, where a call of two and one
    of one cost little; for a small model it is the other way round. So what calls took decides.

    Args:
        sizes: Compiled batch sizes, ascending.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._seconds: dict[Hashable, dict[int, deque[float]]] = {}

    def note(self, shape: Hashable, size: int, seconds: float) -> None:
        """Notes what a call took.

        Args:
            shape: What distinguishes calls beside their batch size.
            size: A compiled batch size.
        """
        if shape in self._seconds or len(self._seconds) < _SHAPES:
            times = self._seconds.setdefault(shape, {})
            times.setdefault(size, deque(maxlen=_LATEST)).append(seconds)

    def parts(self, shape: Hashable, rows: int) -> list[int]:
        """Returns the rows of each call that a batch should run as, at most the largest size; often all in one."""
        noted = self._seconds.get(shape, {})
        times = {size: median(noted[size]) for size in self._sizes if len(noted.get(size, ())) >= _FEWEST}
        padded = next(size for size in self._sizes if size >= rows)
        if rows == padded or padded not in times:
            return [rows]
        seconds, parts = _cheapest(rows, times)
        return parts if seconds < (1 - _GAIN) * times[padded] else [rows]


def _cheapest(rows: int, times: dict[int, float]) -> tuple[float, list[int]]:
    """Returns the shortest time for ``rows``, and the rows of each call in it."""
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for count in range(1, rows + 1):
        ways = []
        for size, seconds in times.items():
            before, parts = best[max(count - size, 0)]
            ways.append((before + seconds, [min(size, count), *parts]))
        best.append(min(ways))
    return best[rows]
