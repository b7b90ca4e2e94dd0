"""Claims and intervals: how often they are right where the truth is known."""

import math

import numpy as np
import pytest

from torchserve_openvino.bench.statistics import claim_quantile, contrasts, grows, requests_needed


@pytest.mark.parametrize(("late", "needed"), [(0, 459), (1, 662), (10, 2010)])
def test_a_p99_needs_as_many_requests_as_mlperf_says(late: int, needed: int) -> None:
    assert requests_needed(late) == needed
    assert claim_quantile(needed, late).shown
    assert not claim_quantile(needed - 1, late).shown


def test_a_claim_that_is_not_shown_says_what_is_missing() -> None:
    assert str(claim_quantile(300, 0)) == "p99 not shown: 300 of 459 requests, 0 late"
    with pytest.raises(ValueError, match="between 0 and 5"):
        claim_quantile(5, 6)


def test_claims_at_the_limit_are_hardly_ever_wrong() -> None:
    # A server that is late in just over 1 % of all requests: each claim is wrong.
    rng = np.random.default_rng(3)
    wrong = sum(claim_quantile(3000, int((rng.random(3000) < 0.0101).sum())).shown for _ in range(1000))
    assert wrong <= 30


def test_the_effect_of_slow_minutes_is_removed() -> None:
    rng = np.random.default_rng(0)
    rates, minutes = np.array([100.0, 90.0, 60.0]), np.array([1.0, 0.5, 1.4, 0.9])[:, None]
    ratios = contrasts(np.log(rates * minutes * np.exp(rng.normal(0, 0.01, (4, 3)))))
    assert ratios[0].value == 1
    assert ratios[1].low < 0.9 < ratios[1].high < 1
    assert ratios[2].high < 0.65


def test_missing_rounds_leave_the_comparison_right() -> None:
    rates, minutes = np.array([100.0, 90.0, 60.0]), np.array([1.0, 0.5, 1.4])[:, None]
    table = np.log(rates * minutes)
    table[1:, 2] = math.nan
    assert [round(each.value, 6) for each in contrasts(table)] == [1.0, 0.9, 0.6]


def test_equal_contenders_are_not_told_apart() -> None:
    rng = np.random.default_rng(1)
    told_apart = sum(
        min(each.high for each in contrasts(rng.normal(0, 0.05, (5, 2)))) < 1 for _ in range(400)
    )  # fmt: skip
    assert told_apart <= 400 * 0.02


def test_one_round_is_no_comparison() -> None:
    with pytest.raises(ValueError, match="at least 2 rounds"):
        contrasts(np.zeros((1, 2)))


def test_a_growing_queue_is_seen_and_noise_is_not() -> None:
    rng = np.random.default_rng(2)
    due = np.sort(rng.random(400)) * 4
    assert grows(list(20 + 100 * due + rng.exponential(5, 400)), list(due))
    assert not grows(list(20 + rng.exponential(20, 400)), list(due))
    assert not grows([1.0, 2.0, 3.0], [0.0, 0.1, 0.2])
