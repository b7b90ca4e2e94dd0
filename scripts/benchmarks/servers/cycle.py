"""The rounds: each contender in turn is started, loaded and stopped, with nothing else running."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.servers import contenders, load, usage
from benchmarks.servers.contenders import Options, SkippedError
from benchmarks.servers.load import Load, Order
from benchmarks.servers.photos import Photo

SHARES = (0.5, 0.8)


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        clients: Levels of the closed loop.
        rates: Levels of the open loop; None for shares of the closed-loop throughput of `ours`, else of the first one.
        seconds: Of each measurement.
        warmup: Seconds of load before the first one, shared by the levels of the closed loop.
        cap: Outstanding requests of the open loop.
        seed: Of its arrivals.
    """

    names: list[str]
    clients: list[int]
    rates: list[float] | None
    seconds: float
    warmup: float
    rounds: int
    cap: int
    seed: int

    @property
    def order(self) -> list[str]:
        """`ours` first when the others' rates come from it."""
        first = contenders.OURS if self.rates is None and contenders.OURS in self.names else None
        return sorted(self.names, key=lambda name: name != first)


@dataclass
class Result:
    """The figures of one contender over all rounds.

    Attributes:
        figures: Of each load, one entry per round.
        memory: Of each worker process after the loads of the last round.
        start_seconds: From the start until all workers were ready, of each round.
    """

    name: str
    figures: dict[Load, list[dict[str, Any]]] = field(default_factory=dict)
    memory: list[usage.Memory] = field(default_factory=list)
    tree_rss: float = 0.0
    start_seconds: list[float] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    skipped: str | None = None
    failed: str | None = None

    @property
    def errors(self) -> int:
        """Wrong answers and failed requests, over all loads and rounds."""
        return sum(errors(one) for rounds in self.figures.values() for one in rounds)

    def as_json(self) -> dict[str, Any]:
        """Everything, with the loads as a list."""
        loads = [{"kind": one.kind, "level": one.level, "rounds": rounds} for one, rounds in self.figures.items()]
        memory = [asdict(one) for one in self.memory]
        own = {key: value for key, value in vars(self).items() if key not in {"figures", "memory"}}
        return {**own, "workers_memory_mb": memory, "loads": loads}


def errors(figures: dict[str, Any]) -> int:
    """Wrong answers and failed requests of one measurement."""
    return int(figures["wrong"]) + sum(figures["failed"].values())


class Cycle:
    """Runs a plan.

    Args:
        plan: What is measured.
        options: How the contenders are configured.
        photos: What is sent.
        work: A folder for archives and photos.
        console: Where progress goes.
    """

    def __init__(self, plan: Plan, options: Options, photos: Sequence[Photo], work: Path, console: Console) -> None:
        self.plan, self.options, self.work, self.console = plan, options, work, console
        self.photos = load.save(photos, work)
        self.results = {name: Result(name) for name in plan.names}
        self.rates = plan.rates

    def run(self) -> list[Result]:
        """Runs all rounds; a contender that failed or cannot run is not tried again."""
        for turn in range(1, self.plan.rounds + 1):
            for name in self.plan.order:
                result = self.results[name]
                if result.skipped or result.failed:
                    continue
                title = f"round {turn}/{self.plan.rounds}, {name}"
                try:
                    self._contender(result, title)
                except SkippedError as reason:
                    result.skipped = str(reason)
                    self.console.print(f"[yellow]{title}: skipped, {reason}", highlight=False, soft_wrap=True)
                except Exception as error:
                    # One failure must not lose the others' figures.
                    result.failed = f"{type(error).__name__}: {error}"
                    self.console.print(f"[red]{title}: failed", highlight=False, soft_wrap=True)
                    self.console.print(result.failed, markup=False, highlight=False, soft_wrap=True)
        return list(self.results.values())

    def _contender(self, result: Result, title: str) -> None:
        start = time.monotonic()
        with (
            self.console.status(f"{title}: starting") as status,
            contenders.serve(result.name, self.options, self.work) as running,
        ):
            result.start_seconds.append(time.monotonic() - start)
            result.settings = running.settings
            self._say(f"{title}: ready in {result.start_seconds[-1]:.0f} s, {len(running.workers)} workers")
            order = self._order(running.url, Load("closed", 1))
            status.update(f"{title}: warming up")
            seconds_each = self.plan.warmup / len(self.plan.clients)
            load.warm_up(order, seconds_each, self.plan.clients, running.root)
            for one in [Load("closed", level) for level in self.plan.clients]:
                status.update(f"{title}: {one}")
                self._measure(result, running, one, title)
            for one in [Load("open", rate) for rate in self._open_rates(result)]:
                status.update(f"{title}: {one}")
                self._measure(result, running, one, title)
            result.memory = usage.memory(running.workers)
            everything = usage.memory([process.pid for process in usage.tree(running.root)])
            result.tree_rss = sum(one.rss for one in everything)
            status.update(f"{title}: stopping")

    def _order(self, url: str, one: Load) -> Order:
        settle = min(1.0, self.plan.seconds / 5)
        plan = self.plan
        return Order(url, self.photos, one.kind, one.level, plan.seconds, settle, plan.seed, plan.cap)

    def _measure(self, result: Result, running: contenders.Running, one: Load, title: str) -> None:
        figures = load.measure(self._order(running.url, one), running.root)
        result.figures.setdefault(one, []).append(figures)
        tail = f", p99 {figures['p99']:.0f} ms" if figures["p99"] is not None else ""
        self._say(f"{title}: {one}: {figures['rate']:.1f} requests/s{tail}")
        if errors(figures):
            self.console.print(
                f"[red]  {figures['wrong']} wrong, failed: {figures['failed']}", highlight=False, soft_wrap=True
            )
            self.console.print("  " + "\n  ".join(figures["examples"]), markup=False, highlight=False, soft_wrap=True)
            if sum(figures["failed"].values()):
                self.console.print(running.log_tail(), markup=False, highlight=False, soft_wrap=True)

    def _open_rates(self, result: Result) -> list[float]:
        """Rates of the open loop; the first contender fixes them, so that all get the same arrivals."""
        if self.rates is None:
            best = max(one["rate"] for rounds in result.figures.values() for one in rounds)
            self.rates = [round(best * share, 1) for share in SHARES] if best else []
            self._say(f"open loop at {' and '.join(map(str, self.rates))} requests/s, from {result.name}")
        return self.rates

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
