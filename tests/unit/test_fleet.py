"""The simulation of a fleet: one worker compiles, the others read."""

import pytest

pytest.importorskip("simpy", reason="needs the extra bench")

from benchmarks.fleet import Start, simulate

COLD, WARM = Start(20.0, 1, 1, 0), Start(5.0, 0, 0, 1, read=100_000_000)


@pytest.mark.parametrize("workers", [1, 2, 100])
def test_one_compiles_and_all_are_ready(workers: int) -> None:
    fleet = simulate(COLD, WARM, workers, per_second=100, bandwidth=1e9, readers=8)
    assert fleet.compiles == 1 and len(fleet.ready) == workers
    assert fleet.read == (workers - 1) * WARM.read
    assert min(fleet.ready) == pytest.approx(COLD.seconds)


def test_storage_is_shared() -> None:
    """100 MB for each of 99 workers over 1 GB/s take 9.9 s after the first one has compiled."""
    fleet = simulate(COLD, WARM, 100, per_second=1000, bandwidth=1e9, readers=10)
    assert max(fleet.ready) == pytest.approx(COLD.seconds + 9.9, abs=0.3)


def test_who_comes_later_does_not_wait() -> None:
    """At one worker a second, those after the compilation take as long as one that finds everything."""
    fleet = simulate(COLD, WARM, 60, per_second=1, bandwidth=1e9, readers=10)
    assert fleet.compiles == 1 and max(fleet.ready) == pytest.approx(59 + WARM.seconds, abs=0.2)
