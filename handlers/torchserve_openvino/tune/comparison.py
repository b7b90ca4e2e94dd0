"""Measures one or two servers in turns."""

import contextlib
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchserve_openvino.bench.bodies import Body
from torchserve_openvino.bench.client import Plan
from torchserve_openvino.bench.rate import RateSearch
from torchserve_openvino.bench.statistics import claim_quantile, contrasts
from torchserve_openvino.bench.torchserve_process import TorchServeProcess
from torchserve_openvino.bench.window import Limit, MeasuredWindow, measure
from torchserve_openvino.errors import ConfigError
from torchserve_openvino.serving.observation.load import SAVES_ENV
from torchserve_openvino.tune.archives import Variants
from torchserve_openvino.tune.session import requests_for
from torchserve_openvino.tune.settings import Settings

_READY_SECONDS = 600.0


class Comparison:
    """The command ``bench``.

    Args:
        targets: One or two: each a URL to which requests are posted, or a .mar, for which a server is
            started; the second one may also be a YAML, with which the first archive is served.
        bodies: The requests; None takes the first archive's warm-up samples.
        settings: Limit, rate and length of a window.
        rounds: How often each is measured.
        tell: Gets a line of progress.
        measured: Sends the requests of a plan and returns what happened.
    """

    def __init__(
        self,
        targets: Sequence[str],
        bodies: list[Body] | None,
        settings: Settings,
        rounds: int,
        tell: Callable[[str], None],
        measured: Callable[[Plan, Limit, int | None], MeasuredWindow] = measure,
    ) -> None:
        self._measured = measured
        self._targets, self._bodies, self._settings = list(targets), bodies, settings
        self._rounds, self._tell = rounds, tell
        self._windows: list[list[MeasuredWindow]] = [[] for _ in targets]

    def run(self) -> dict[str, Any]:
        """Measures, and returns the figures of each target and the verdict between two, JSON-safe.

        Raises:
            ConfigError: There is nothing to send.
            PackagingError: An archive can't be read.
            TorchServeError: A server did not start.
        """
        rng = random.Random(self._settings.seed)
        scores = np.full((self._rounds, len(self._targets)), np.nan)
        starts = [0.0] * len(self._targets)
        results: list[list[float]] = [[] for _ in self._targets]
        for turn in range(self._rounds):
            for index in rng.sample(range(len(self._targets)), len(self._targets)):
                # One server at a time: two would share the cores.
                with self._serving(self._targets[index]) as (url, root):
                    self._tell(f"round {turn + 1} of {self._rounds}: {self._targets[index]}")
                    score = self._score(index, url, root, starts[index], turn)
                    starts[index] = score or starts[index]
                    results[index].append(score)
                    scores[turn, index] = math.log(score) if score > 0 else math.nan
        return {
            "targets": [self._facts(index, results[index]) for index in range(len(self._targets))],
            "verdict": self._verdict(scores),
            "windows": [[window.as_json() for window in windows] for windows in self._windows],
        }

    @contextlib.contextmanager
    def _serving(self, target: str) -> Iterator[tuple[str, int | None]]:
        if target.startswith(("http://", "https://")):
            if self._bodies is None:
                raise ConfigError("a URL needs requests: --requests FOLDER.", key="requests")
            yield target, None
            return
        with tempfile.TemporaryDirectory(prefix="torchserve-openvino-bench-") as scratch:
            # A YAML is another configuration of the first archive.
            other = Path(target) if target.endswith((".yaml", ".yml")) else None
            variants = Variants(Path(self._targets[0] if other is not None else target), Path(scratch))
            if self._bodies is None:
                self._bodies, warnings = requests_for(None, variants)
                for warning in warnings:
                    self._tell(f"warning: {warning}")
            archive = variants.make({}, other)
            environment = {SAVES_ENV: "0"}
            models = {variants.name: archive.name}
            with TorchServeProcess(variants.store, models=models, environment=environment) as server:
                server.wait_ready(variants.name, _READY_SECONDS)
                yield f"{server.inference_url}/predictions/{variants.name}", server.group

    def _score(self, index: int, url: str, root: int | None, start: float, turn: int) -> float:
        """Returns the highest rate that holds, or, at a fixed rate, 1000 divided by the median latency in ms."""
        seeds = iter(range(turn * 1000, turn * 1000 + 999))
        windows: list[MeasuredWindow] = []

        def window_at(rate: float) -> MeasuredWindow:
            window = self._measured(self._plan(url, rate, next(seeds)), self._settings.limit, root)
            self._tell(f"{rate:.1f} requests/s: p99 {window.percentile(0.99):.0f} ms {window.disturbed}")
            windows.append(window)
            return window

        ceiling = self._measured(self._plan(url, 0.0, next(seeds)), self._settings.limit, root)
        if self._settings.rate is not None:
            window = window_at(self._settings.rate)
            self._windows[index].append(window)
            median = window.percentile(0.5)
            return 1e3 / median if median > 0 else 0.0
        rate = RateSearch(window_at, start or max(0.2, 0.7 * ceiling.rate), windows=6).run()
        self._windows[index] += [window for window in windows if window.rate == rate]
        return rate

    def _plan(self, url: str, rate: float, seed: int) -> Plan:
        bodies = [body.named for body in self._bodies or []]
        return Plan(url, bodies, rate, self._settings.window, clients=16, settle=1.0, seed=seed)

    def _facts(self, index: int, scores: Sequence[float]) -> dict[str, Any]:
        """Returns the median round's rate, and what was measured at this rate or a higher one."""
        rate = self._settings.rate or statistics.median_low(scores)
        windows = [window for window in self._windows[index] if rate and window.rate >= rate]
        latencies = np.concatenate([np.asarray(window.latencies) for window in windows] or [np.empty(0)])
        late = sum(window.late for window in windows)
        limited = math.isfinite(self._settings.limit.milliseconds) and len(latencies)
        # A request that failed took for ever.
        times = np.nan_to_num(latencies, nan=math.inf)
        return {
            "target": self._targets[index],
            "rate": rate or None,
            "p50": _finite_quantile(times, 0.5),
            "p99": _finite_quantile(times, 0.99),
            "requests": len(latencies),
            "failures": sum(sum(window.failures.values()) for window in windows),
            "disturbed": sum(bool(window.disturbed) for window in windows),
            "claim": str(claim_quantile(len(latencies), min(late, len(latencies)))) if limited else None,
        }

    def _verdict(self, scores: np.ndarray) -> str:
        if len(self._targets) < 2:
            return ""
        if not np.isfinite(scores).all():
            return "not comparable: in a round one of them held no rate"
        ratios = contrasts(scores)
        worse = min(range(len(ratios)), key=lambda index: ratios[index].value)
        better, ratio = 1 - worse, ratios[worse]
        if ratio.high >= 1:
            return f"no difference is shown: {self._targets[worse]} has {ratio} times the other's figure"
        what = "faster at this rate" if self._settings.rate is not None else "faster"
        return f"{self._targets[better]} is {what}: {self._targets[worse]} has {ratio} times its figure"


def _finite_quantile(times: np.ndarray, share: float) -> float | None:
    """Returns a quantile; None if it is infinite, or there is none."""
    value = float(np.quantile(times, share, method="higher")) if len(times) else math.inf
    return value if math.isfinite(value) else None
