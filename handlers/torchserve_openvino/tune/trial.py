"""Second stage: one candidate on a real TorchServe, under Poisson load."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from torchserve_openvino.bench.bodies import Body
from torchserve_openvino.bench.client import Plan
from torchserve_openvino.bench.machine import available_memory
from torchserve_openvino.bench.rate import RateSearch, confirmed
from torchserve_openvino.bench.torchserve_process import TorchServeError, TorchServeProcess
from torchserve_openvino.bench.window import MeasuredWindow, measure
from torchserve_openvino.serving.observation.load import SAVES_ENV
from torchserve_openvino.tune.profile import RESERVE, wrong_answer
from torchserve_openvino.tune.proof import ModelAnswer
from torchserve_openvino.tune.search import RejectedError
from torchserve_openvino.tune.settings import Settings

_READY_SECONDS = 600.0
# Before a window counts: connections, and batches of all sizes.
_SETTLE = 1.0
_WARM_CLIENTS = 16
_WARM_TIMEOUT = 600.0
# A window has so many requests on average, if it does not take longer than this.
_REQUESTS, _LONGEST = 10, 60.0


@dataclass
class Trial:
    """What one start of a server showed.

    Attributes:
        rate: Highest rate in requests/s at which the limits held; 0 if none did.
        p99_ms: 99th percentile at that rate; None if none held.
        memory: Bytes of the server's processes at the end.
        cores: Cores that the server took at that rate.
        ready_seconds: From the start until the model was READY.
        windows: All windows, JSON-safe.
        disturbed: Windows that did not count.
    """

    rate: float = 0.0
    p99_ms: float | None = None
    memory: int = 0
    cores: float = 0.0
    ready_seconds: float = 0.0
    windows: list[dict[str, Any]] = field(default_factory=list)
    disturbed: int = 0

    def score(self, goal: str) -> float:
        """Returns what the goal compares, higher is better; 0 if the candidate can't serve."""
        if goal == "latency":
            return 1e3 / self.p99_ms if self.rate and self.p99_ms else 0.0
        if goal == "cost":
            return self.rate / max(self.cores, 0.05)
        return self.rate


@dataclass
class Bench:
    """Starts servers for candidates and measures them.

    Args:
        store: Folder of the archives.
        name: The model's name.
        bodies: The requests.
        expected: Eager PyTorch's answers to them.
        settings: Limits and effort.
        environment: Of each server and its workers.
        tell: Gets a line of progress.
        reserve: Bytes of memory that have to stay free while a server loads.
    """

    store: Path
    name: str
    bodies: Sequence[Body]
    expected: Sequence[ModelAnswer]
    settings: Settings
    environment: Mapping[str, str]
    tell: Callable[[str], None]
    reserve: int = RESERVE

    def run(self, archive: Path, precision: str, start: float, seed: int) -> Trial:
        """Measures a candidate once.

        Args:
            archive: Its archive, in `store`.
            precision: Its precision, for the tolerance of its answers.
            start: A first rate to try, in requests/s.
            seed: Of the arrivals; equal ones for all candidates of a round.

        Raises:
            RejectedError: It does not become READY, answers wrongly, or does what it must not.
            TorchServeError: The server died.
        """
        with self._serving(archive, precision) as (server, trial):
            self._measure(server, trial, start, seed)
        return trial

    def confirm(self, archive: Path, precision: str, rate: float, seed: int) -> Trial:
        """Measures a candidate at a rate until five windows in a row hold; each failure lowers the rate.

        Args:
            archive: As in `run`.
            precision: As in `run`.
            rate: In requests/s.
            seed: As in `run`.

        Returns:
            A trial with the rate that held, 0 if none did. With a given rate, only that one counts.

        Raises:
            RejectedError: As in `run`.
            TorchServeError: As in `run`.
        """
        with self._serving(archive, precision) as (server, trial):
            windows: list[MeasuredWindow] = []
            window_at = self._windows(server, trial, seed)

            def recorded(rate: float) -> MeasuredWindow:
                windows.append(window_at(rate))
                return windows[-1]

            self._warm(server, seed)
            confirmed_rate = confirmed(rate, recorded)
            if confirmed_rate and (self.settings.rate is None or confirmed_rate == rate):
                last = [window for window in windows if window.rate == confirmed_rate]
                self._take(
                    trial, confirmed_rate, sorted(last, key=lambda window: window.percentile(0.99))[len(last) // 2]
                )
        return trial

    @contextlib.contextmanager
    def _serving(self, archive: Path, precision: str) -> Iterator[tuple[TorchServeProcess, Trial]]:
        """Starts a candidate's server, compares its answers, and judges its report and memory at the end."""
        begin = time.monotonic()
        properties = {"default_response_timeout": "120", "max_request_size": str(64 * 2**20)}
        server = TorchServeProcess(
            self.store, models={self.name: archive.name}, properties=properties, environment=self.environment
        )
        with contextlib.ExitStack() as stack:
            with on_cores(self.settings.cores):
                stack.enter_context(server)
            try:
                server.wait_ready(self.name, _READY_SECONDS, self._leave_memory)
            except TorchServeError as error:
                if not server.alive:
                    # A port that another program took first, or a kill: the next start may do better.
                    raise
                raise RejectedError(f"it did not become READY: {_cause(str(error))}") from error
            trial = Trial(ready_seconds=time.monotonic() - begin)
            try:
                self._prove(server, precision)
                yield server, trial
                _check_report(server, self.name)
            except RejectedError as error:
                # What was seen of a server that was killed says nothing about its configuration.
                self._check_alive(server, error)
                raise
            self._check_alive(server)
        if self.settings.memory is not None and trial.memory > self.settings.memory:
            raise RejectedError(
                f"it takes {trial.memory / 1e6:.0f} MB, more than {self.settings.memory / 1e6:.0f}",
                trial.memory / self.settings.memory,
            )

    def _leave_memory(self) -> None:
        if (left := available_memory()) < self.reserve:
            raise RejectedError(f"too little memory: {left / 1e6:.0f} MB were left while it was loaded")

    def _check_alive(self, server: TorchServeProcess, cause: Exception | None = None) -> None:
        """Checks that neither the server nor a worker died.

        Raises:
            TorchServeError: One did.
        """
        if not server.alive:
            raise TorchServeError("TorchServe ended in mid-trial") from cause
        if server.load_failures(self.name):
            raise TorchServeError("a worker ended in mid-trial") from cause

    def _plan(self, server: TorchServeProcess, rate: float, seed: int) -> Plan:
        return Plan(
            url=f"{server.inference_url}/predictions/{self.name}", bodies=[body.named for body in self.bodies],
            rate=rate, seconds=_seconds(self.settings.window, rate), settle=_SETTLE, seed=seed,
            streamed=self.settings.ttft is not None,
        )  # fmt: skip

    def _warm(self, server: TorchServeProcess, seed: int) -> MeasuredWindow:
        """Returns a window of a closed loop, which no rate exceeds."""
        plan = self._plan(server, 0.0, seed)
        # The last of its clients waits for as many calls as there are clients, however long a call takes.
        warm = replace(
            plan, clients=_WARM_CLIENTS, seconds=max(1.0, plan.seconds / 2), settle=0.0, streamed=False,
            timeout=_WARM_TIMEOUT,
        )  # fmt: skip
        window = measure(warm, self.settings.limit, server.group)
        if window.failures:
            raise RejectedError(f"requests failed: {dict(window.failures)} {window.examples[:1]}")
        return window

    def _windows(self, server: TorchServeProcess, trial: Trial, seed: int) -> Callable[[float], MeasuredWindow]:
        """Returns a function that measures a window at a rate, and puts it into the trial."""
        seeds = iter(range(seed * 1000, seed * 1000 + 999))

        def window_at(rate: float) -> MeasuredWindow:
            window = measure(self._plan(server, rate, next(seeds)), self.settings.limit, server.group)
            result = "held" if window.held else "missed"
            self.tell(f"{rate:.1f} requests/s: {result}, p99 {window.percentile(0.99):.0f} ms {window.disturbed}")
            trial.windows.append(window.as_json())
            trial.disturbed += bool(window.disturbed)
            trial.memory = window.memory
            self._check_alive(server)
            return window

        return window_at

    def _measure(self, server: TorchServeProcess, trial: Trial, start: float, seed: int) -> None:
        ceiling, window_at = self._warm(server, seed), self._windows(server, trial, seed)
        if self.settings.goal == "latency" and self.settings.rate is not None:
            windows = [window_at(self.settings.rate) for _ in range(3)]
            if not all(window.held for window in windows):
                raise self._missed(windows)
            self._take(trial, self.settings.rate, sorted(windows, key=lambda window: window.percentile(0.99))[1])
            return
        # No more than the closed loop reaches; the first guess is near it.
        first = min(start, 0.85 * ceiling.rate) if start else 0.7 * ceiling.rate
        search = RateSearch(window_at, max(first, 0.2), windows=6)
        rate = search.run()
        if self.settings.rate is not None and rate < self.settings.rate:
            excess = self.settings.rate / rate if rate else math.inf
            raise RejectedError(f"it holds {rate:.1f} requests/s, fewer than {self.settings.rate:g}", excess)
        if not rate:
            raise self._missed([window for _, window in search.history if isinstance(window, MeasuredWindow)])
        for tried, window in search.history:
            if tried == rate and isinstance(window, MeasuredWindow) and window.held:
                self._take(trial, rate, window)

    def _missed(self, windows: Sequence[MeasuredWindow]) -> RejectedError:
        """Returns that no window held, and by how much the best of them missed the limits."""
        best = min(windows, key=lambda window: (sum(window.failures.values()), window.percentile(0.99)))
        if best.failures:
            return RejectedError(f"requests failed at each rate: {dict(best.failures)} {best.examples[:1]}")
        p99, limits = best.percentile(0.99), self.settings.limit
        reason = f"no rate at which the limits hold: at {best.rate:.1f} requests/s the p99 was {p99:.0f} ms"
        excess = p99 / limits.milliseconds
        if best.first_bytes and math.isfinite(limits.first_bytes):
            first = float(np.quantile(best.first_bytes, limits.quantile))
            reason += f", of the first bytes {first:.0f} ms"
            excess = max(excess, first / limits.first_bytes)
        return RejectedError(reason + ("; its queue grew" if best.growing else ""), excess)

    @staticmethod
    def _take(trial: Trial, rate: float, window: MeasuredWindow) -> None:
        trial.rate, trial.p99_ms, trial.cores = rate, window.percentile(0.99), window.server_cores

    def _prove(self, server: TorchServeProcess, precision: str) -> None:
        answers = []
        for body in self.bodies:
            try:
                reply = server.predict(self.name, body.data, body.content_type)
            except httpx.HTTPError as error:
                raise RejectedError(f"{body.path.name} got no answer: {error}") from error
            answers.append(ModelAnswer(reply.status_code, reply.headers.get("content-type", ""), reply.content))
        if wrong := wrong_answer(self.expected, answers, precision, self.bodies):
            raise RejectedError(wrong)


def _check_report(server: TorchServeProcess, name: str) -> None:
    """Rejects what runs outside OpenVINO against the policy, or compiles after READY.

    Raises:
        RejectedError: It does.
    """
    try:
        report = server.describe(name)
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise RejectedError(f"its report can't be read: {error}") from error
    serving = report.get("serving") or {}
    if violations := serving.get("policy", {}).get("violations"):
        raise RejectedError(f"it violates the policy: {violations[0]}")
    if compiled := serving.get("compiles_after_ready", 0):
        raise RejectedError(f"it compiled {compiled} times after READY")


def _cause(text: str) -> str:
    errors = [line.split("ERROR:", 1)[1] for line in text.splitlines() if "ERROR:" in line]
    return next(iter([*errors, *text.splitlines()]), "").strip()[:300]


def environment_for(cache: Path) -> dict[str, str]:
    """Returns further variables of servers and processes: a cache of the tuner, and no reports of its servers.

    No others: they would override those by which a server has folders of its own.
    """
    return {"OPENVINO_TORCH_CACHE_DIR": str(cache), "OPENVINO_TORCH_MODEL_CACHING": "true", SAVES_ENV: "0"}


@contextlib.contextmanager
def on_cores(cores: int | None) -> Iterator[None]:
    """Restricts what is started within to some of this process's cores; None: to all of them."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _seconds(window: float, rate: float) -> float:
    """Returns how long a window is, in seconds: longer than the settings say where it had next to no requests."""
    return max(window, min(_REQUESTS / rate, _LONGEST)) if rate else window
