"""Chooses the calls that a batch runs as: one, padded where its size is not compiled, or several smaller ones."""

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median

# Calls of a size that have to be timed, and the latest ones that count.
_FEWEST, _LATEST = 5, 9
# Several calls have to save this part of the time of one.
_GAIN = 0.1
# Every so many batches one is run to time a size of which little is known, or in one call, whose time may have changed.
_TRY, _RENEW = 8, 64
# Most shapes whose calls are timed.
_SHAPES = 256


@dataclass
class _Calls:
    """Calls of one shape: how many batches were asked for, and the latest times by batch size."""

    batches: int = 0
    seconds: dict[int, deque[float]] = field(default_factory=dict)

    def known(self, size: int) -> bool:
        return len(self.seconds.get(size, ())) >= _FEWEST


class CallCosts:
    """Times of calls by batch size.

    What is cheapest depends on the model and on the machine: three rows padded to four cost a model that computes much
    a third more than they need, where the call itself is all that a small one costs; and four rows may leave the
    processor's cache where two rows stay in it.

    Args:
        sizes: Compiled batch sizes, ascending.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._calls: dict[Hashable, _Calls] = {}

    def note(self, shape: Hashable, size: int, seconds: float) -> None:
        """Notes what a call took.

        Args:
            shape: What distinguishes calls besides their batch size.
            size: A compiled batch size.
        """
        if shape in self._calls or len(self._calls) < _SHAPES:
            calls = self._calls.setdefault(shape, _Calls())
            calls.seconds.setdefault(size, deque(maxlen=_LATEST)).append(seconds)

    def parts(self, shape: Hashable, rows: int, compiled: Collection[int] | None = None) -> list[int]:
        """Returns the rows of each call that a batch should run as.

        Args:
            rows: At most the largest size.
            compiled: The sizes that are compiled for this shape, all if None; no other one is tried.
        """
        calls = self._calls.get(shape)
        sizes = [size for size in self._sizes if compiled is None or size in compiled]
        if calls is None or rows == 1 or not sizes or sizes[-1] < rows:
            return [rows]
        calls.batches += 1
        unknown = [size for size in sizes if size < rows and not calls.known(size)]
        if unknown and calls.batches % _TRY == 0:
            times, rest = divmod(rows, unknown[-1])
            return [unknown[-1]] * times + [rest] * (rest > 0)
        padded = next(size for size in sizes if size >= rows)
        if not calls.known(padded) or calls.batches % _RENEW == 0:
            return [rows]
        times_of = {size: median(calls.seconds[size]) for size in sizes if calls.known(size)}
        seconds, parts = _cheapest(rows, times_of)
        return parts if seconds < (1 - _GAIN) * times_of[padded] else [rows]


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
