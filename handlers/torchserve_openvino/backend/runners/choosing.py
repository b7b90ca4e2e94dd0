"""The backend ``auto``: tries every backend on a model's first call, and keeps the best one.

A backend whose result differs from eager's is excluded, whatever its coverage. Of the others, the one that leaves the
least to eager wins, and among equals the fastest. If the cache holds what an earlier process chose, only that is tried,
unless it fails.
"""

import logging
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.capture.kept_state import StateKeeper
from torchserve_openvino.backend.runners.guarded import Runner, Traced, is_exported
from torchserve_openvino.backend.runtime.compare import difference, reordered
from torchserve_openvino.report import Tracker

logger = logging.getLogger(__name__)

# Timed calls of each candidate. They take turns, so that other load on the machine affects all of them.
ROUNDS = 7


@dataclass
class Candidate:
    """One backend, and how it did on the first call.

    Attributes:
        coverage: Share of operators on OpenVINO, 0..1.
        milliseconds: Median time of a call; 0 if none was timed.
        problem: Why it is excluded; empty if it is not.
    """

    name: str
    runner: Runner
    coverage: float = 0.0
    milliseconds: float = 0.0
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the data for the report."""
        return {"coverage": self.coverage, "milliseconds": round(self.milliseconds, 4), "problem": self.problem}


class ChoosingRunner(Runner):
    """Tries several backends at the first call; the best one takes over, and `report` is its report from then on.

    Args:
        model: The model.
        makers: Maps each backend's name to a function that makes its runner.
    """

    def __init__(self, model: Callable[..., Any], makers: Mapping[str, Callable[[], Runner]]) -> None:
        tracker = Tracker()
        tracker.config["backend"] = "auto"
        super().__init__(model, lambda: _eager(model, tracker, "none was tried yet"), tracker)
        self._makers = makers
        self._chosen: Runner | None = None
        self._freezes = False
        self._lock = threading.Lock()
        self._become: Callable[[Runner], None] = lambda runner: None

    def settles(self, become: Callable[[Runner], None]) -> None:
        """See `Runner`."""
        self._become = become

    def freeze(self) -> None:
        """See `Runner`."""
        self._freezes = True

    @property
    def freezes(self) -> bool:
        """See `Runner`."""
        return self._freezes

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model; the first call tries every backend."""
        if is_exported(args, kwargs):
            return self.inside(args, kwargs)
        with self._lock:
            answer = self._choose(args, kwargs) if self._chosen is None else None
        if answer is not None:
            return answer[0]
        assert self._chosen is not None
        return self._chosen(args, kwargs)

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """Chooses a backend; returns the call's result if the call could run only once, else None."""
        bench = _Bench(self.model, args, kwargs)
        made = {name: make() for name, make in self._makers.items()}
        if self.freezes:
            for compiled in made.values():
                compiled.freeze()
        if bench.wrote:
            self._take_first(made, bench.wrote)
            return (bench.keep(),)
        # Chosen and stored by an earlier process; another choice would have to compile the other shapes again.
        stored = [name for name, compiled in made.items() if compiled.in_cache(args, kwargs)][:1]
        candidates = [bench.check(Candidate(name, made.pop(name))) for name in stored]
        if not stored or candidates[0].problem:
            candidates += [bench.check(Candidate(name, compiled)) for name, compiled in made.items()]
        fit = [candidate for candidate in candidates if not candidate.problem]
        bench.time(fit)
        best = min(fit, key=lambda candidate: (-candidate.coverage, candidate.milliseconds), default=None)
        for candidate in candidates:
            if candidate is not best:
                candidate.runner.drop()
        facts = {
            "chosen": best.name if best else "eager",
            "from_cache": best is not None and best.name in stored,
            "tried": {candidate.name: candidate.to_dict() for candidate in candidates},
        }
        if best is not None:
            chosen = best.runner
        else:
            reasons = "; ".join(f"{candidate.name}: {candidate.problem}" for candidate in candidates)
            chosen = Runner(self.model, lambda: _eager(self.model, self._tracker, reasons), self._tracker)
        chosen.report.tracker.set_config("backend_choice", facts)
        self.report.follow(chosen.report)
        logger.info("Backend %s is used. Tried: %s", facts["chosen"], facts["tried"])
        self._settle(chosen)
        return None

    def _settle(self, chosen: Runner) -> None:
        self._chosen = chosen
        self._become(chosen)

    def _take_first(self, made: Mapping[str, Runner], wrote: list[str]) -> None:
        """Takes the first backend untried: the model writes to its weights, and each further run would do so again."""
        name, chosen = next(iter(made.items()))
        reason = f"the model writes to its weights ({', '.join(wrote)}), so nothing was tried: this call ran in eager"
        chosen.report.tracker.set_config(
            "backend_choice", {"chosen": name, "from_cache": False, "tried": {}, "reason": reason}
        )
        chosen.report.tracker.add_fallback("conversion_failed", "whole model", reason=reason)
        self.report.follow(chosen.report)
        logger.warning("Backend %s is used: %s", name, reason)
        self._settle(chosen)


def _eager(model: Callable[..., Any], tracker: Tracker, problems: str) -> Traced:
    """Returns the model in eager PyTorch, with each call counted as a fallback."""

    def call(*args: Any, **kwargs: Any) -> Any:
        reason = f"no backend gave eager's answer: {problems}"
        answer = model(*args, **kwargs)
        if tracker.add_fallback("conversion_failed", "whole model", reason=reason):
            logger.warning("Fallback: the whole model runs in eager PyTorch: %s", reason)
        return answer

    return Traced(call)


class _Bench:
    """Runs one call repeatedly, each time as if it were the first.

    Inputs are copies, torch's random generator starts from the same state, and the model's state is restored. Weights
    can't be restored: a model that writes to them runs only once.

    Attributes:
        wrote: Names of the weights that the model wrote to in its one run.
    """

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given = (args, kwargs)
        self._call = pytree.tree_map(_copy, self._given)
        self._generator = torch.get_rng_state()
        weights = StateKeeper(model, contents=False, weights=True)
        self._keeper = StateKeeper(model, contents=True)
        self._used = pytree.tree_map(_copy, self._call)
        self._expected = model(*self._used[0], **self._used[1])
        self._checks = [(self._call, self._expected)] * 2
        self.wrote = weights.unrestorable()
        if not self.wrote:
            self._put_back()
            self._add_other_values(model)

    def _add_other_values(self, model: Callable[..., Any]) -> None:
        """Adds a check with other values, which reveals values of the first call that were recorded as constants."""
        other = reordered(self._call)
        if other is None:
            return
        try:
            self._checks.append((other, self.run(lambda args, kwargs: model(*args, **kwargs), other)[0]))
        except Exception as error:
            logger.info("Backends are compared on one set of values; eager refuses the other: %s", error)

    def keep(self) -> Any:
        """Returns the only run's result, and applies its changes to the caller's inputs: that run becomes the call."""
        for given, used in zip(pytree.tree_leaves(self._given), pytree.tree_leaves(self._used), strict=True):
            if isinstance(given, torch.Tensor) and not torch.equal(given, used):
                with torch.no_grad():
                    given.copy_(used)
        return self._expected

    def _put_back(self) -> None:
        torch.set_rng_state(self._generator)
        self._keeper.restore()

    def run(self, runner: Callable[[Any, Any], Any], call: Any) -> tuple[Any, float]:
        """Runs a call; returns its result and the seconds that it took."""
        args, kwargs = pytree.tree_map(_copy, call)
        torch.set_rng_state(self._generator)
        try:
            start = time.perf_counter()
            answer = runner(args, kwargs)
            return answer, time.perf_counter() - start
        finally:
            self._put_back()

    def check(self, candidate: Candidate) -> Candidate:
        """Compiles by calling: twice, because a second call confirms the first, then once more with other values."""
        logger.info("Backend %s: compiling, comparing, timing", candidate.name)
        try:
            for call, expected in self._checks:
                with candidate.runner.poisoned():
                    answer, _ = self.run(candidate.runner, call)
                precision = str(candidate.runner.report.summary.precision)
                candidate.problem = candidate.problem or difference(answer, expected, precision)
        except Exception as error:
            # Eager PyTorch ran this call, so any error is the fault of the backend.
            logger.warning("Backend %s failed: %s", candidate.name, error)
            candidate.problem = f"{type(error).__name__}: {error}"
        candidate.coverage = candidate.runner.report.summary.coverage
        return candidate

    def time(self, candidates: list[Candidate]) -> None:
        """Times the candidates, one call of each in turn."""
        seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
        for _ in range(ROUNDS):
            for candidate in candidates:
                seconds[candidate.name].append(self.run(candidate.runner, self._call)[1])
        for candidate in candidates:
            candidate.milliseconds = statistics.median(seconds[candidate.name]) * 1e3


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
