"""The queueing model against what theory says."""

import math
import random

import numpy as np
import pytest

from torchserve_openvino.tune.queueing import OVERHEAD_MS, QueueingModel, highest_rate, interpolated, latencies


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_worker_without_batches_waits_as_theory_says(load: float) -> None:
    # M/D/1: the mean wait is load / (2 (1 - load)) service times (Pollaczek and Khinchine).
    server = QueueingModel(1, 1, 0, lambda size: 10.0, spread=0.0)
    times = latencies(server, load * 100, 200_000, random.Random(0)) - OVERHEAD_MS
    assert float(times.mean()) == pytest.approx(10 + 10 * load / (2 * (1 - load)), rel=0.03)


def test_batches_and_workers_raise_the_rate_and_a_limit_lowers_it() -> None:
    service = interpolated({1: 10.0, 8: 40.0})
    alone = highest_rate(QueueingModel(1, 1, 1, service), 100)
    batched = highest_rate(QueueingModel(1, 8, 1, service), 100)
    assert 60 < alone < 100 < batched < 200
    assert highest_rate(QueueingModel(2, 8, 1, service), 100) > 1.6 * batched
    assert highest_rate(QueueingModel(1, 8, 1, service), 45) < batched
    assert highest_rate(QueueingModel(1, 8, 1, service), 5) == pytest.approx(0, abs=0.1)


def test_a_worker_waits_for_its_batch_as_long_as_it_may() -> None:
    server = QueueingModel(1, 8, 50, lambda size: 1.0, spread=0.0)
    # At one request in ten seconds each waits alone.
    times = latencies(server, 0.1, 200, random.Random(0))
    assert float(np.median(times)) == pytest.approx(51 + OVERHEAD_MS)


def test_times_between_measured_sizes() -> None:
    service = interpolated({1: 10.0, 4: 16.0, 8: 28.0})
    assert [service(size) for size in (1, 2, 4, 6, 8, 10)] == [10.0, 12.0, 16.0, 22.0, 28.0, 34.0]
    assert interpolated({4: 20.0})(8) == 40.0
    assert math.isfinite(highest_rate(QueueingModel(1, 4, 1, service), math.inf))
