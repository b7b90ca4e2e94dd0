"""How often the tuner is right, on simulated servers whose best configuration is known.

    python scripts/benchmarks/tuner.py
    python scripts/benchmarks/tuner.py --runs 20 --only search,equal

Each simulated server has one queue and known service times with noise; one window in five is disturbed, and half of the
disturbed ones go unnoticed; the whole machine drifts. The code that chooses, searches and compares is the real one.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import output
from torchserve_openvino.bench.client import Plan
from torchserve_openvino.bench.rate import RateSearch
from torchserve_openvino.bench.statistics import claim_quantile, grows
from torchserve_openvino.bench.window import Limit, MeasuredWindow
from torchserve_openvino.tune.candidates import Candidate, ComputeSettings
from torchserve_openvino.tune.comparison import Comparison
from torchserve_openvino.tune.queueing import QueueingModel, highest_rate, interpolated, latencies
from torchserve_openvino.tune.search import RejectedError, Search, SearchResult
from torchserve_openvino.tune.settings import Settings

CORES, BUDGET, P99 = 2, 20, 100.0
_SIZES = (1, 2, 4, 8, 16)


@dataclass
class Machine:
    """What happens to all servers of a simulated machine.

    Attributes:
        seed: Of everything that is random.
        disturbed: Share of the windows in which another process takes part of the cores.
        noticed: Share of these of which the load generator knows.
        neighbor: From this window on, another process stays.
        windows: Windows so far.
    """

    seed: int
    disturbed: float = 0.2
    noticed: float = 0.5
    neighbor: float = math.inf
    windows: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"machine {self.seed}")

    def window(self, server: QueueingModel, plan: Plan, limit: Limit) -> MeasuredWindow:
        """Measures a server as `bench.window.measure` does a real one."""
        self.windows += 1
        slowness = 1 + 0.1 * math.sin(self.windows / 20) + max(-0.05, self.rng.gauss(0, 0.02))
        slowness *= 1.4 if self.windows > self.neighbor else 1.0
        note = ""
        if self.rng.random() < self.disturbed:
            slowness *= self.rng.uniform(1.2, 2.5)
            note = "other processes took 1.20 cores" if self.rng.random() < self.noticed else ""
        slowed = replace(server, service_ms=lambda size: server.service_ms(size) * slowness)
        most = max(server.workers * n / slowed.service_ms(n) * 1e3 for n in range(1, server.batch_size + 1))
        rate = plan.rate or most
        count = max(1, int(rate * plan.seconds))
        times = latencies(slowed, rate if plan.rate else rate * 0.99, count, random.Random(self.rng.random()))
        growing = bool(plan.rate) and grows(list(times), list(np.arange(count) / rate))
        return MeasuredWindow(rate, limit, list(times), [], {}, [], growing, note, 0.1, 1.0, 1, plan.seconds)


def plan_for(rate: float, seed: int, settings: Settings) -> Plan:
    """Returns a window's plan; a rate of 0 is a closed loop."""
    return Plan("http://simulated", [], rate, settings.window, seed=seed)


# --- the search -------------------------------------------------------------------------------------------------------


def service_times(seed: int) -> dict[ComputeSettings, dict[int, float]]:
    """Returns the true milliseconds of a call by batch size, for each way to compute of a made-up model."""
    rng = random.Random(f"model {seed}")
    call, item = rng.uniform(1, 6), rng.uniform(2, 12)
    parallel, faster = rng.uniform(0.5, 1.0), rng.uniform(1.1, 2.5)
    times = {}
    for precision, gain in (("f32", 1.0), ("bf16", faster)):
        for threads in (1, CORES):
            speed = gain * (1 + (threads - 1) * parallel)
            times[ComputeSettings(precision, threads)] = {size: call + item * size / speed for size in _SIZES}
    return times


def servers_of(times: Mapping[ComputeSettings, Mapping[int, float]], candidate: Candidate) -> QueueingModel:
    """Returns the simulated server of a candidate."""
    service = interpolated(dict(times[candidate.engine]))
    return QueueingModel(candidate.workers, candidate.batch_size, candidate.delay_ms, service)


def true_rate(times: Mapping[ComputeSettings, Mapping[int, float]], candidate: Candidate) -> float:
    """Returns the highest rate of a candidate on a quiet machine, by a simulation without disturbances."""
    return highest_rate(servers_of(times, candidate), P99, requests=3000, seed=7)


@dataclass(frozen=True)
class Searched:
    """One simulated run of the tuner.

    Attributes:
        choice: The result of the search.
        rates: True rates of all candidates.
        lead: How many times as fast the best one is as the second.
    """

    choice: SearchResult[Candidate]
    rates: Mapping[Candidate, float]
    lead: float

    @property
    def right(self) -> bool:
        """Whether the best one was chosen, or one that is shown to be as good by less than the smallest gain."""
        return self.share > 0.98

    @property
    def gains(self) -> bool:
        """Whether the chosen one is at least as fast as the present one."""
        best = self.choice.best
        return best is not None and self.rates[best.candidate] >= self.rates[self.choice.standings[0].candidate]

    @property
    def share(self) -> float:
        """The chosen one's true rate, relative to the best one's."""
        best = self.choice.best
        return self.rates[best.candidate] / max(self.rates.values()) if best is not None else 0.0


def searched(
    seed: int, machine: Machine | None = None, trap: Callable[[Candidate, int], None] = lambda candidate, turn: None
) -> Searched | None:
    """Runs the search on simulated servers; None where no candidate leads by 10 %, so that none is the best.

    Args:
        seed: Of the model, the machine and the order.
        machine: Another machine than the usual one.
        trap: Is called before each trial, and may reject the candidate.
    """
    times, settings = service_times(seed), Settings(p99=P99)
    rng = random.Random(f"search {seed}")
    machine = machine or Machine(seed)
    present = Candidate(ComputeSettings("f32", CORES), 1, 1, 1)
    others = [
        Candidate(engine, workers, size, delay)
        for engine in times
        for workers in ((1, CORES) if engine.threads == 1 else (1,))
        for size, delay in ((1, 1), (4, 5), (16, 5), (16, 20))
    ]
    rivals = rng.sample([other for other in others if other != present], 4)
    rates = {candidate: true_rate(times, candidate) for candidate in (present, *rivals)}
    first, second = sorted(rates.values(), reverse=True)[:2]
    if first < 1.1 * second:
        return None
    started = dict.fromkeys(rates, 0)
    # The queueing model knows service times with an error.
    guesses = {candidate: rate * math.exp(rng.gauss(0, 0.2)) for candidate, rate in rates.items()}

    def score(candidate: Candidate) -> float:
        started[candidate] += 1
        trap(candidate, started[candidate])
        server = servers_of(times, candidate)

        def window_at(rate: float) -> MeasuredWindow:
            return machine.window(server, plan_for(rate, machine.windows, settings), settings.limit)

        ceiling = window_at(0.0).rate
        guess = min(guesses[candidate] or ceiling, 0.85 * ceiling)
        guesses[candidate] = RateSearch(window_at, max(guess, 0.2), windows=6).run()
        return guesses[candidate]

    choice = Search(score, BUDGET, rng).run(present, rivals)
    return Searched(choice, rates, first / second)


def searches(runs: int, **options: Any) -> list[Searched]:
    """Returns so many runs with a known best candidate."""
    results: list[Searched] = []
    seed = 0
    while len(results) < runs:
        machine = Machine(seed, **options)
        if (result := searched(seed, machine)) is not None:
            results.append(result)
        seed += 1
    return results


# --- traps ------------------------------------------------------------------------------------------------------------


def traps(runs: int) -> dict[str, int]:
    """Returns for each trap in how many runs it was not fallen into, and in how many the best one was chosen.

    The first two are fallen into if the candidate that gives wrong answers or failures is chosen; the others, which are
    disturbances of the machine, if a configuration is chosen that is slower than the present one.
    """
    kept = dict.fromkeys(("wrong answers", "fast failures"), 0)
    seed = done = 0
    while done < runs:
        fair = searched(seed)
        if fair is None:
            seed += 1
            continue
        best = max(fair.rates, key=lambda candidate: fair.rates[candidate])

        def wrong(candidate: Candidate, _: int, best: Candidate = best) -> None:
            if candidate == best:
                raise RejectedError("wrong answer to a.json: answer differs by 0.3, more than 0.03")

        def failing(candidate: Candidate, _: int, best: Candidate = best) -> None:
            # Failures are answered at once: by the rate alone it would win.
            window = replace(_instant(), failures={"503": 400})
            if candidate == best and (window.held or RateSearch(lambda rate: window, 50.0, windows=6).run()):
                raise AssertionError("failures were taken for answers")
            if candidate == best:
                raise RejectedError("requests failed")

        for name, trap in (("wrong answers", wrong), ("fast failures", failing)):
            result = searched(seed, trap=trap)
            chosen = result.choice.best if result is not None else None
            kept[name] += chosen is None or chosen.candidate != best
        machines = {"a cold cache": ColdCache(seed), "a neighbor in mid-run": Machine(seed, neighbor=40)}
        for name, machine in machines.items():
            result = searched(seed, machine)
            for label, held in ((name, result and result.gains), (f"{name}: best chosen", result and result.right)):
                kept[label] = kept.get(label, 0) + bool(held)
        seed, done = seed + 1, done + 1
    return kept


class ColdCache(Machine):
    """A machine on which the first windows of the whole run are slow: files and kernels are not cached yet."""

    def window(self, server: QueueingModel, plan: Plan, limit: Limit) -> MeasuredWindow:
        """Measures as `Machine.window`."""
        if self.windows < 10:
            slow = replace(server, service_ms=lambda size: 2.0 * server.service_ms(size))
            return super().window(slow, plan, limit)
        return super().window(server, plan, limit)


def _instant() -> MeasuredWindow:
    return MeasuredWindow(100.0, Limit(P99), [math.nan] * 400, [], {}, [], False, "", 0.1, 1.0, 1, 4.0)


# --- claims and comparisons -------------------------------------------------------------------------------------------


def wrong_claims(runs: int, share: float = 0.0101, requests: int = 3000) -> int:
    """Returns how many of so many claims were made of a server that is late in just over 1 % of its requests."""
    rng = np.random.default_rng(3)
    return sum(claim_quantile(requests, int((rng.random(requests) < share).sum())).shown for _ in range(runs))


def told_apart(runs: int, ratio: float = 1.0, rate: float | None = None, rounds: int = 3) -> int:
    """Returns in how many of so many runs `bench --against` says that one of two servers is faster.

    Args:
        runs: Seeded runs.
        ratio: How many times as fast the second server is; 1: they are equal.
        rate: Requests/s at which latencies are compared, instead of the highest rates.
        rounds: Of each comparison.
    """
    names = ["http://one", "http://other"]
    apart = 0
    for seed in range(runs):
        machine = Machine(seed)
        servers = {
            name: QueueingModel(1, 8, 5, interpolated({1: 8.0 / speed, 8: 30.0 / speed}))
            for name, speed in zip(names, (1.0, ratio), strict=True)
        }

        def measured(
            plan: Plan, limit: Limit, _: int | None, machine: Machine = machine, servers: Any = servers
        ) -> MeasuredWindow:
            return machine.window(servers[plan.url], plan, limit)

        settings = Settings(p99=P99, rate=rate, seed=seed)
        verdict = Comparison(names, [], settings, rounds, lambda text: None, measured).run()["verdict"]
        apart += "is faster" in verdict
    return apart


def main(
    runs: Annotated[int, typer.Option(help="Seeded runs of each simulation.", min=1)] = 100,
    only: Annotated[str, typer.Option(help="search, traps, claims and equal, by comma.")] = "search,traps,claims,equal",
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for all figures.")] = None,
) -> None:
    """Says how often the tuner is right.

    Examples: tuner.py; tuner.py --runs 20 --only search,equal
    """
    names = output.chosen(only, dict.fromkeys(("search", "traps", "claims", "equal"), ""), "--only")
    rows: list[tuple[str, ...]] = []
    if "search" in names:
        results = searches(runs)
        trials = max(result.choice.trials for result in results)
        within = sum(result.share >= 0.95 for result in results)
        rows.append(
            ("the best candidate is chosen", f"{sum(result.right for result in results)} of {runs}", ">= 95 of 100")
        )
        rows.append(("within 5 % of the best", f"{within} of {runs}", ""))
        rows.append(("most trials", str(trials), f"<= {BUDGET}"))
    if "traps" in names:
        few = max(1, runs // 5)
        rows += [(f"trap: {name}", f"{count} of {few}", "") for name, count in traps(few).items()]
    if "claims" in names:
        rows.append(("claims at the limit that are right", f"{runs - wrong_claims(runs)} of {runs}", ">= 97 of 100"))
    if "equal" in names:
        rows.append(("equal servers told apart, highest rate", f"{told_apart(runs)} of {runs}", "<= 1 of 20"))
        rows.append(
            ("equal servers told apart, at 40 requests/s", f"{told_apart(runs, rate=40.0)} of {runs}", "<= 1 of 20")
        )
        for rounds in (3, 6):
            label = f"one twice as fast told apart, {rounds} rounds"
            rows.append((label, f"{told_apart(runs, 2.0, rounds=rounds)} of {runs}", ""))
    output.results().print(output.table("", ["simulation", "result", "demanded"], rows, 1))
    output.write_json(json_path, {"rows": rows})


if __name__ == "__main__":
    typer.run(main)
