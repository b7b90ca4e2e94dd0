"""The search for the highest rate, on servers whose highest rate is known."""

import random
from dataclasses import dataclass

import pytest

from torchserve_openvino.bench.rate import RateSearch, confirmed, highest_held


@dataclass(frozen=True)
class Seen:
    held: bool
    disturbed: str = ""


class Simulated:
    """A server whose limit holds below a rate; windows near it are uncertain, and one in five is disturbed."""

    def __init__(self, highest: float, seed: int, silent: bool = False) -> None:
        self._highest, self._random, self._silent = highest, random.Random(seed), silent
        self.windows = 0

    def __call__(self, rate: float) -> Seen:
        self.windows += 1
        capacity = self._highest * self._random.gauss(1, 0.02)
        if self._random.random() < 0.2:
            return Seen(rate < capacity * 0.5, "" if self._silent else "other processes took 1.20 cores")
        return Seen(rate < capacity)


@pytest.mark.parametrize("start", [3.0, 40.0, 900.0])
def test_the_highest_rate_is_found_from_any_start(start: float) -> None:
    found = [RateSearch(Simulated(100, seed), start, windows=14).run() for seed in range(100)]
    assert sum(88 <= rate <= 105 for rate in found) >= 90


def test_a_server_that_holds_no_rate_has_none() -> None:
    assert RateSearch(lambda rate: Seen(False), 50).run() == 0.0
    assert highest_held([]) == 0.0


def test_a_machine_that_is_never_quiet_gives_a_rate_all_the_same() -> None:
    search = RateSearch(lambda rate: Seen(rate < 30, "the client sent 9.0 ms late"), 20, repeats=1)
    assert 20 <= search.run() < 30
    # Each window was tried again.
    assert len(search.history) % 2 == 0


def test_a_lucky_window_is_outvoted() -> None:
    assert highest_held([(10, True), (20, True), (30, False), (40, False), (50, True), (60, False)]) == 20


def test_a_rate_is_lowered_until_all_runs_hold() -> None:
    server = Simulated(100, 5, silent=True)
    assert confirmed(0.0, server) == 0.0
    assert 30 < confirmed(100.0, server, runs=3) < 100
    assert confirmed(100.0, lambda rate: Seen(False)) == 0.0
