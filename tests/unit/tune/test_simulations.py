"""How often the tuner is right on simulated servers; scripts/benchmarks/tuner.py prints the same figures."""

import subprocess
import sys

import pytest

from benchmarks.tuner import BUDGET, Machine, searched, searches, told_apart, traps, wrong_claims
from documents import ROOT


def test_the_best_candidate_is_chosen_on_a_machine_that_is_disturbed() -> None:
    results = searches(4)
    assert all(each.choice.trials <= BUDGET for each in results)
    assert sum(each.right for each in results) >= 3
    assert all(each.share > 0.8 for each in results)


@pytest.mark.slow
def test_the_best_candidate_is_chosen_in_95_of_100_runs() -> None:
    results = searches(100)
    assert all(each.choice.trials <= BUDGET for each in results)
    assert sum(each.right for each in results) >= 95


def test_claims_at_the_limit_are_right_in_97_of_100_cases() -> None:
    assert wrong_claims(1000) <= 30


def test_equal_servers_are_told_apart_in_one_of_20_runs_at_most() -> None:
    assert told_apart(20) <= 1
    assert told_apart(20, rate=40.0) <= 1


def test_a_server_that_is_twice_as_fast_is_told_apart() -> None:
    assert told_apart(10, ratio=2.0, rounds=6) >= 8


def test_the_script_prints_the_figures() -> None:
    command = [sys.executable, "scripts/benchmarks/tuner.py", "--runs", "2", "--only", "claims"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "2 of 2" in done.stdout


@pytest.mark.slow
def test_nobody_falls_into_traps() -> None:
    kept = traps(2)
    assert {name: count for name, count in kept.items() if "best" not in name} == {
        "wrong answers": 2, "fast failures": 2, "a cold cache": 2, "a neighbor in mid-run": 2
    }  # fmt: skip


@pytest.mark.slow
def test_a_quiet_machine_and_one_whose_neighbor_stays_give_the_same_choice() -> None:
    runs = [
        (searched(seed, Machine(seed, disturbed=0)), searched(seed, Machine(seed, neighbor=30))) for seed in range(6)
    ]
    pairs = [(quiet, busy) for quiet, busy in runs if quiet is not None and busy is not None]
    assert len(pairs) >= 2
    assert all(quiet.share > 0.98 and busy.share > 0.9 for quiet, busy in pairs)
