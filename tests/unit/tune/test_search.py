"""The search, on machines whose best configuration is known."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from torchserve_openvino.tune.search import RejectedError, Search, SearchResult

BUDGET = 20


def machine(rates: list[float], rng: random.Random) -> Callable[[int], float]:
    """A machine whose speed drifts; each trial is the median of five windows, one in five of which is disturbed."""
    trials = 0

    def measure(candidate: int) -> float:
        nonlocal trials
        trials += 1
        drift = 1 + 0.15 * math.sin(trials / 7)
        windows = []
        for _ in range(5):
            rate = rates[candidate] * drift * math.exp(rng.gauss(0, 0.03))
            windows.append(rate * rng.uniform(0.5, 0.9) if rng.random() < 0.2 else rate)
        return float(np.median(windows))

    return measure


def searched(rates: list[float], seed: int) -> SearchResult[int]:
    rng = random.Random(seed)
    return Search(machine(rates, rng), BUDGET, rng).run(0, range(1, len(rates)))


def test_the_best_of_five_is_found_within_twenty_trials() -> None:
    right = 0
    for seed in range(100):
        rng = random.Random(1000 + seed)
        rates = [100 * (1 - rng.uniform(0.1, 0.4)) for _ in range(5)]
        best = rng.randrange(5)
        rates[best] = 100.0
        choice = searched(rates, seed)
        right += choice.best is not None and choice.best.candidate == best
        assert choice.trials <= BUDGET
    assert right >= 95


def test_nobody_wins_by_less_than_the_interval() -> None:
    changed = sum(searched([100.0] * 4, seed).best.candidate != 0 for seed in range(100))
    assert changed <= 10


def test_the_present_one_stays_where_it_is_the_best() -> None:
    choice = searched([100.0, 70.0, 60.0], 1)
    assert choice.best is choice.standings[0]
    assert "nothing better" in choice.reason
    assert "slower than the best" in choice.standings[2].left or "lower half" in choice.standings[2].left


def test_a_gain_is_stated_with_its_interval() -> None:
    choice = searched([50.0, 100.0, 60.0], 2)
    assert choice.best.candidate == 1
    assert "better than the present configuration: 2" in choice.reason
    assert choice.standings[0].ratio.high < 0.7


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rejected_candidate_is_out_whatever_its_speed(bad: int) -> None:
    def measure(candidate: int) -> float:
        if candidate == bad:
            raise RejectedError("wrong answer to a.jpg")
        return 100.0 - candidate

    choice = Search(measure, BUDGET, random.Random(0)).run(0, [1, 2])
    assert choice.standings[bad].left == "wrong answer to a.jpg"
    assert choice.best.candidate != bad
    if bad == 0:
        assert choice.reason == "the present configuration is out: wrong answer to a.jpg"


def test_no_candidate_that_serves_is_said() -> None:
    choice = Search(lambda candidate: 0.0, BUDGET, random.Random(0)).run(0, [1])
    assert choice.best is None
    assert "no candidate" in choice.reason
    assert choice.standings[1].left == "no rate at which the limit holds"


def test_an_interrupted_search_has_a_choice() -> None:
    calls = 0

    def measure(candidate: int) -> float:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise KeyboardInterrupt
        return 100.0 + 5 * candidate + calls % 2

    search = Search(measure, BUDGET, random.Random(0))
    with pytest.raises(KeyboardInterrupt):
        search.run(0, [1])
    choice = search.so_far()
    assert choice.trials == 6
    assert choice.best is not None and math.isfinite(choice.best.score)


def test_time_ends_the_search_after_two_rounds() -> None:
    search = Search(lambda candidate: 100.0 + candidate, BUDGET, random.Random(0), may_continue=lambda: False)
    assert search.run(0, [1, 2]).trials == 6


def test_where_nobody_holds_the_limits_the_nearest_is_named() -> None:
    def measure(candidate: int) -> float:
        reason, excess = {0: ("p99 was 300 ms", 3.0), 1: ("p99 was 120 ms", 1.2), 2: ("wrong answer", math.inf)}[
            candidate
        ]
        raise RejectedError(reason, excess)

    choice = Search(measure, BUDGET, random.Random(0)).run(0, [1, 2])
    assert choice.best is None
    assert choice.reason == "no candidate serves the requests within the limits; the nearest is 1: p99 was 120 ms"


def test_an_interrupt_before_the_first_result_is_said() -> None:
    def measure(candidate: int) -> float:
        raise KeyboardInterrupt

    search = Search(measure, BUDGET, random.Random(0))
    with pytest.raises(KeyboardInterrupt):
        search.run(0, [1])
    assert search.so_far().reason == "the search was interrupted before any candidate was measured"


def test_what_was_not_measured_is_not_out() -> None:
    done: list[int] = []

    def measure(candidate: int) -> float:
        if candidate == 0:
            raise KeyboardInterrupt
        done.append(candidate)
        return 100.0

    # The present one comes last in the first round with this seed.
    search = Search(measure, BUDGET, random.Random(0))
    with pytest.raises(KeyboardInterrupt):
        search.run(0, [1, 2])
    assert done
    choice = search.so_far()
    assert choice.best is choice.standings[0]
    assert choice.reason.startswith("the search was interrupted before the present configuration")


@pytest.mark.parametrize("reason", ["it takes 900 MB, more than 500", ""])
@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_those_that_stay_wins_where_the_fastest_is_out(reason: str, seed: int) -> None:
    rng = random.Random(seed)
    rates, turns = [100.0, 200.0, 150.0, 107.0, 108.0], [0] * 5

    def measure(candidate: int) -> float:
        turns[candidate] += 1
        if candidate == 1 and turns[1] == 2:
            if reason:
                raise RejectedError(reason)
            return 0.0
        return rates[candidate] * math.exp(rng.gauss(0, 0.03))

    choice = Search(measure, BUDGET, rng).run(0, [1, 2, 3, 4])
    assert choice.best.candidate == 2 and "better than the present configuration: 1." in choice.reason
    assert choice.standings[1].left == (reason or "no rate at which the limit holds")


def test_the_present_one_is_out_where_it_is_rejected_after_it_was_measured() -> None:
    turns = [0, 0]

    def measure(candidate: int) -> float:
        turns[candidate] += 1
        if candidate == 0 and turns[0] == 2:
            raise RejectedError("it compiled 2 times after READY")
        return 100.0 if candidate == 0 else 99.0

    choice = Search(measure, BUDGET, random.Random(0)).run(0, [1])
    assert choice.best.candidate == 1
    assert choice.reason == "the present configuration is out: it compiled 2 times after READY"


def test_those_that_were_left_behind_serve_where_each_finalist_is_rejected() -> None:
    rounds = 0

    def measure(candidate: int) -> float:
        nonlocal rounds
        rounds += candidate == 0
        if rounds > 2 and candidate in (0, 1, 2):
            raise RejectedError("no memory")
        return [100.0, 110.0, 109.0, 70.0, 60.0][candidate]

    for seed in range(20):
        rounds = 0
        choice = Search(measure, BUDGET, random.Random(seed)).run(0, [1, 2, 3, 4])
        assert choice.best is None or not choice.best.rejected


def test_a_winner_that_cannot_serve_after_all_leaves_the_present_one() -> None:
    choice = searched([50.0, 100.0, 60.0], 2)
    without = choice.without_winner("wrong answer")
    assert choice.best.candidate == 1 and without.best is choice.standings[0]
    assert "could not serve when it was started once more: wrong answer; the present" in without.reason
    choice.standings[0].left, choice.standings[0].rejected = "no memory", True
    assert choice.without_winner("wrong answer").best is None
    assert without.without_winner("again") is without
