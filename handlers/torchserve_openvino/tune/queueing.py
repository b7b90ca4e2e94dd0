"""Predicts latencies of a server from the service times of its model, by simulating its queue.

TorchServe keeps one queue per model. A free worker takes the first request, then waits up to ``maxBatchDelay``
for others until it has ``batchSize`` of them; then the model answers the batch. Formulas for such queues with batches
(M/G^[b]/c) exist in limits only; a simulation of some thousand requests takes milliseconds and has no such limits.
"""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# The frontend, two copies over the worker's socket, and the client: added to each request, in milliseconds.
OVERHEAD_MS = 3.0


@dataclass(frozen=True)
class QueueingModel:
    """A model behind TorchServe's queue.

    Attributes:
        workers: Worker processes.
        batch_size: Most requests of a call.
        delay_ms: Milliseconds that a worker waits for further requests.
        service_ms: Milliseconds of one call by number of requests, while all workers are busy.
        spread: Relative standard deviation of the service times.
    """

    workers: int
    batch_size: int
    delay_ms: float
    service_ms: Callable[[int], float]
    spread: float = 0.05


def latencies(server: QueueingModel, rate: float, requests: int, rng: random.Random) -> np.ndarray:
    """Simulates Poisson arrivals.

    Args:
        server: What answers.
        rate: Requests/s.
        requests: How many.
        rng: Draws arrivals and service times.

    Returns:
        ``[requests]`` latencies in milliseconds, in the order of arrival.
    """
    arrivals, now = np.empty(requests), 0.0
    for index in range(requests):
        now += rng.expovariate(rate) * 1e3
        arrivals[index] = now
    free = [0.0] * server.workers
    heapq.heapify(free)
    result = np.empty(requests)
    first = 0
    while first < requests:
        idle = heapq.heappop(free)
        start = max(idle, arrivals[first])
        last = first + 1
        # What waits already is taken at once; then the worker waits for more.
        until = start + server.delay_ms
        while last < requests and last - first < server.batch_size and arrivals[last] <= until:
            last += 1
        full = last - first == server.batch_size
        begin = max(start, arrivals[last - 1]) if full else max(until, start)
        if server.batch_size == 1:
            begin = start
        noise = max(0.2, rng.gauss(1.0, server.spread))
        end = begin + server.service_ms(last - first) * noise
        result[first:last] = end - arrivals[first:last] + OVERHEAD_MS
        heapq.heappush(free, end)
        first = last
    return result


def highest_rate(
    server: QueueingModel, limit_ms: float, quantile: float = 0.99, requests: int = 3000, seed: int = 0
) -> float:
    """Returns the highest rate in requests/s at which the quantile of simulated latencies is within the limit.

    Args:
        server: What answers.
        limit_ms: Limit of the latency in milliseconds; infinite: the rate at which the queue stays short.
        quantile: Share of the requests that must be in time.
        requests: Of each simulation.
        seed: Of each simulation.
    """
    # The queue can't be stable beyond the throughput of full batches.
    ceiling = max(server.workers * size / server.service_ms(size) * 1e3 for size in range(1, server.batch_size + 1))
    bound = limit_ms if math.isfinite(limit_ms) else 20 * server.service_ms(server.batch_size) + server.delay_ms
    low, high = 0.0, ceiling
    for _ in range(12):
        rate = (low + high) / 2
        times = latencies(server, rate, requests, random.Random(seed))
        if float(np.quantile(times, quantile)) <= bound:
            low = rate
        else:
            high = rate
    return low


def interpolated(measured: dict[int, float]) -> Callable[[int], float]:
    """Returns service times for all sizes of batch from those of some, in milliseconds.

    Between two measured sizes the time is linear; beyond the largest it grows as between the last two.

    Args:
        measured: Milliseconds by size; at least one.
    """
    sizes = sorted(measured)
    times = [measured[size] for size in sizes]
    slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else times[-1] / sizes[-1]

    def service(size: int) -> float:
        if size > sizes[-1]:
            return times[-1] + slope * (size - sizes[-1])
        return float(np.interp(size, sizes, times))

    return service
