"""Where the time of requests goes: waiting, decoding, inference, encoding; and how large batches were, and why."""

import bisect
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from torchserve_openvino.serving.requests.messages import Request
from torchserve_openvino.serving.requests.metric_sink import MetricSink

Phase = Literal["queue", "decode", "inference", "encode"]
Release = Literal["full", "delay", "only_one"]
PHASES: tuple[Phase, ...] = ("queue", "decode", "inference", "encode")
RELEASES: tuple[Release, ...] = ("full", "delay", "only_one")
SECONDS, SIZE, BATCHES = "openvino_phase_seconds", "openvino_batch_size", "openvino_batches_total"
# Upper bounds of the histograms' buckets.
BOUNDS: dict[str, tuple[float, ...]] = {
    SECONDS: (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    SIZE: (1, 2, 4, 8, 16, 32, 64),
}
# Set by proxies (nginx and others): when they got the request.
_ARRIVED = "X-Request-Start"
# Clocks of two machines differ; a wait of more than this is none.
_LONGEST_WAIT = 3600.0


class Histogram:
    """Counts values by size, as Prometheus' histograms do."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self._counts)

    def buckets(self) -> dict[str, int]:
        """Returns how many values were at most as large as each bound, the last of which is infinite."""
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return dict(zip(bounds, accumulate(self._counts), strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Returns count, sum and buckets, JSON-safe."""
        return {"count": self.count, "sum": round(self.sum, 6), "buckets": self.buckets()}


class CallTimes:
    """The times of one call of a handler.

    Decoding is what comes before the first call of a compiled model, encoding what comes after the last one; inference
    is the time in such calls. As a context, it is the call that its thread answers.

    Args:
        requests: The requests of the call.
        on_end: Gets these times when the context ends.

    Attributes:
        requests: As above.
        waits: Seconds that each request waited before the call; None where that is not known.
        started: When the call began, in nanoseconds since 1970.
    """

    def __init__(self, requests: Sequence[Request], on_end: "Callable[[CallTimes], None]" = lambda _: None) -> None:
        now = time.time()
        self._on_end = on_end
        self.requests, self.waits = requests, [_wait(request, now) for request in requests]
        self.started = time.time_ns()
        self._start = self._end = time.perf_counter_ns()
        self._first: int | None = None
        self._last = 0
        self._inference = 0

    def __enter__(self) -> "CallTimes":
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)
        self.end()
        self._on_end(self)

    def ran(self, start: int, end: int) -> None:
        """Adds one call of a compiled model, by `time.perf_counter_ns`."""
        if self._first is None:
            self._first = start
        self._last = end
        self._inference += end - start

    def end(self) -> None:
        """Ends the call."""
        self._end = time.perf_counter_ns()

    def seconds(self) -> dict[Phase, float]:
        """Returns the seconds of each phase; without a compiled model, everything is decoding."""
        if self._first is None:
            return {"decode": (self._end - self._start) / 1e9}
        return {
            "decode": (self._first - self._start) / 1e9,
            "inference": self._inference / 1e9,
            "encode": (self._end - self._last) / 1e9,
        }

    def spans(self) -> dict[Phase, tuple[int, int]]:
        """Returns when each phase began and ended, in nanoseconds since 1970."""
        shift = self.started - self._start
        if self._first is None:
            return {"decode": (self.started, self._end + shift)}
        return {
            "decode": (self.started, self._first + shift),
            "inference": (self._first + shift, self._last + shift),
            "encode": (self._last + shift, self._end + shift),
        }


_current: ContextVar[CallTimes | None] = ContextVar("current", default=None)


def current_requests() -> Sequence[Request]:
    """Returns the requests of the call that this thread answers."""
    call = _current.get()
    return () if call is None else call.requests


class MeasuredInference:
    """Counts what runs in this context as inference of the call that this thread answers."""

    __slots__ = ("_call", "_start")

    def __enter__(self) -> None:
        self._call = _current.get()
        self._start = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        if self._call is not None:
            self._call.ran(self._start, time.perf_counter_ns())


class RequestTimes:
    """Collects the times of a worker's calls; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forgets all: what ran before READY was no request."""
        with self._lock:
            self.phases = {phase: Histogram(BOUNDS[SECONDS]) for phase in PHASES}
            self.sizes = Histogram(BOUNDS[SIZE])
            self.released = dict.fromkeys(RELEASES, 0)

    def call(self, requests: Sequence[Request], most: int, metrics: MetricSink | None) -> CallTimes:
        """Measures one call.

        Args:
            requests: Its requests.
            most: The most requests of a call.
            metrics: Takes histograms.
        """
        return CallTimes(requests, partial(self._add, _release(len(requests), most), metrics))

    def _add(self, release: Release, metrics: MetricSink | None, call: CallTimes) -> None:
        values = [*call.seconds().items(), *[("queue", wait) for wait in call.waits if wait is not None]]
        with self._lock:
            for phase, value in values:
                self.phases[phase].add(value)
            self.sizes.add(len(call.requests))
            self.released[release] += 1
        # Others get sums from time to time (`MetricsEmitter`).
        if metrics is not None and metrics.takes_histograms:
            for phase, value in values:
                metrics.record("histogram", SECONDS, value, {"phase": phase})
            metrics.record("histogram", SIZE, len(call.requests), {})

    def to_dict(self) -> dict[str, Any]:
        """Returns the histograms, JSON-safe."""
        with self._lock:
            return {
                "seconds": {phase: histogram.to_dict() for phase, histogram in self.phases.items()},
                "batch_size": self.sizes.to_dict(),
                "released": dict(self.released),
            }

    def series(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Returns the same as Prometheus' series: their names and labels, with what was counted so far."""
        with self._lock:
            values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
            histograms = [(SECONDS, (("phase", str(phase)),), histogram_) for phase, histogram_ in self.phases.items()]
            for name, labels, histogram in [*histograms, (SIZE, (), self.sizes)]:
                if histogram.count:
                    for bound, count in histogram.buckets().items():
                        values[f"{name}_bucket", (*labels, ("le", bound))] = count
                    values[f"{name}_sum", labels] = round(histogram.sum, 6)
                    values[f"{name}_count", labels] = histogram.count
            return values


def _release(size: int, most: int) -> Release:
    """Returns why a batch was not kept waiting for further requests."""
    if size >= most:
        return "full"
    return "only_one" if size == 1 else "delay"


def _wait(request: Request, now: float) -> float | None:
    """Returns the seconds that a request has waited; None where that is not known.

    Other hosts than TorchServe say when a request came. TorchServe's frontend does not tell its workers; a proxy before
    it may.
    """
    if request.arrived:
        return max(0.0, now - request.arrived)
    text = request.header(_ARRIVED)
    if text is None:
        return None
    try:
        number = float(text.removeprefix("t="))
    except ValueError:
        return None
    # In seconds, milliseconds or microseconds.
    wait = now - number / (1e6 if number > 1e14 else 1e3 if number > 1e11 else 1.0)
    return wait if 0.0 <= wait <= _LONGEST_WAIT else None
