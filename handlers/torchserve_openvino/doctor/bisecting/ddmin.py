"""Delta debugging: finds a minimal subset for which a test is true.

The algorithm is ddmin of A. Zeller and R. Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE
Transactions on Software Engineering 28(2), 2002, section 3.2, over subsets in a fixed order.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Test = Callable[[tuple[Item, ...]], bool]


@dataclass(frozen=True)
class Minimal(Generic[Item]):
    """What `minimise` found.

    Attributes:
        items: The subset, in the order of the input. The test is true for it.
        tests: How often the test ran; repeated subsets do not count.
        proven: Whether every item is shown to be needed; False where ``max_tests`` was reached first.
    """

    items: tuple[Item, ...]
    tests: int
    proven: bool


class _OutOfTestsError(Exception):
    """The budget is spent."""


class _Memo(Generic[Item]):
    """Tests each subset once, and remembers the smallest one that passed."""

    def __init__(self, items: tuple[Item, ...], test: Test[Item], max_tests: int) -> None:
        self._test = test
        self._max = max_tests
        self._results: dict[frozenset[Item], bool] = {}
        self.best: tuple[Item, ...] | None = None
        self.items = items

    @property
    def tests(self) -> int:
        return len(self._results)

    def __call__(self, subset: Sequence[Item]) -> bool:
        key = frozenset(subset)
        if key not in self._results:
            if len(self._results) >= self._max:
                raise _OutOfTestsError
            ordered = tuple(item for item in self.items if item in key)
            self._results[key] = passed = self._test(ordered)
            if passed and (self.best is None or len(ordered) < len(self.best)):
                self.best = ordered
        return self._results[key]


def minimise(
    items: Sequence[Item], test: Test[Item], *, singles: int | None = None, max_tests: int = 1000
) -> Minimal[Item] | None:
    """Finds a 1-minimal subset for which ``test`` is true: without any one of its items it is false.

    Args:
        items: Without repeats, the most suspicious ones first.
        test: Called with a subset in the order of ``items``; must return the same each time. It need not be monotone.
        singles: How many items are tried alone before the bisection begins; None means all. Each costs one test, and
            usually a single item is guilty.
        max_tests: After this many tests, the smallest subset that has passed is returned.

    Returns:
        The subset; None where the test is false even for all items (or ``max_tests`` is reached before any passes).
    """
    run = _Memo(tuple(dict.fromkeys(items)), test, max_tests)
    try:
        if run(()):
            return Minimal((), run.tests, True)
        if not run(run.items):
            return None
        for item in run.items[:singles]:
            if run((item,)):
                return Minimal((item,), run.tests, True)
        return Minimal(_ddmin(run.items, run), run.tests, True)
    except _OutOfTestsError:
        return None if run.best is None else Minimal(run.best, run.tests, False)


def _ddmin(items: tuple[Item, ...], test: Test[Item]) -> tuple[Item, ...]:
    chunks = 2
    while len(items) >= 2:
        parts = _split(items, min(chunks, len(items)))
        smaller = next((part for part in parts if test(part)), None)
        if smaller is not None:
            items, chunks = smaller, 2
            continue
        rest = (tuple(item for item in items if item not in part) for part in parts)
        smaller = next((part for part in rest if test(part)), None)
        if smaller is not None:
            items, chunks = smaller, max(chunks - 1, 2)
            continue
        if len(parts) == len(items):
            break
        chunks = min(len(items), chunks * 2)
    return items


def _split(items: tuple[Item, ...], parts: int) -> list[tuple[Item, ...]]:
    """Splits into ``parts`` consecutive runs whose lengths differ by at most one."""
    bounds = [len(items) * i // parts for i in range(parts + 1)]
    return [items[start:stop] for start, stop in pairwise(bounds)]
