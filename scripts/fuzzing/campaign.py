"""Runs many programs in worker processes; collects, shrinks and writes the failures."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fuzzing import reduce
from fuzzing.program import Program
from fuzzing.shrink import failure_kind, shrink
from isolation import pool
from isolation.process import Lost

_WORKER = Path(__file__).with_name("worker.py")
# Dynamo and OpenVINO keep some memory per model.
_MODELS_PER_PROCESS = 150


@dataclass
class Failure:
    """A model that differs from eager PyTorch.

    Attributes:
        name: Seed and number, or the name of a stored case.
        kind: Kind of difference.
        detail: What differs.
        program: The shrunk program; empty if a worker could not write it.
        signature: Equal for failures that look alike.
        script: The program as a script.
    """

    name: str
    kind: str
    detail: str
    program: dict[str, Any]
    signature: str
    script: str = ""


@dataclass
class Campaign:
    """A run of the fuzzer.

    Attributes:
        limit: Seconds for one model.
        shrink_seconds: Seconds for one failure; 0 disables shrinking.
        ignored: Kinds that do not count as failures.
        seconds: Time after which no model is started; 0 means no limit.
        mutant: The deliberate fault to inject.
        stop_at_first: Whether to stop at the first failure.
        counts: Number of models by outcome.
        cpu_seconds: CPU time of the models, without shrinking.
    """

    seed: int
    filters: dict[str, Any]
    jobs: int
    limit: float
    console: Console
    shrink_seconds: float = 0.0
    strict: bool = False
    ignored: frozenset[str] = frozenset()
    out: Path | None = None
    seconds: float = 0.0
    mutant: str = ""
    stop_at_first: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    cpu_seconds: float = 0.0
    _ops: float = 0.0
    _on_openvino: float = 0.0
    _began: float = 0.0
    _ended: float = 0.0

    def run(self, indices: Iterable[int]) -> None:
        """Runs these models of the seed."""
        tasks = [{"name": f"{self.seed}-{i}", "seed": self.seed, "index": i, "filters": self.filters} for i in indices]
        self._run(tasks)

    def replay(self, paths: Sequence[Path]) -> None:
        """Runs stored cases, changed as the filters say."""
        programs = [json.loads(path.read_text("utf-8"))["program"] for path in paths]
        self._run(
            [
                {"name": path.stem, "program": program, "filters": self.filters}
                for path, program in zip(paths, programs, strict=True)
            ]
        )

    def distinct(self) -> list[Failure]:
        """The first failure of each signature."""
        return list({failure.signature: failure for failure in reversed(self.failures)}.values())[::-1]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {
            "seed": self.seed, "counts": dict(self.counts), "coverage": self.coverage,
            "models_per_second": self.models_per_second, "cpu_seconds": self.cpu_seconds,
            "failures": [vars(failure) for failure in self.failures],
        }  # fmt: skip

    @property
    def coverage(self) -> float:
        """Share of all models' operators on OpenVINO."""
        return self._on_openvino / self._ops if self._ops else 0.0

    @property
    def models_per_second(self) -> float:
        """Models by wall clock, all workers together."""
        return sum(self.counts.values()) / max(1e-9, self._ended - self._began)

    def _run(self, tasks: list[dict[str, Any]]) -> None:
        self._began = time.monotonic()
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            bar = progress.add_task("models", total=len(tasks))

            def done(task: dict[str, Any], answer: dict[str, Any] | Lost) -> None:
                progress.advance(bar)
                self._count(answer)

            pool.run_all(
                (self._extended(task) for task in tasks), self.jobs, self._worker, done, self._after, self._enough
            )
        self._ended = time.monotonic()

    def _extended(self, task: dict[str, Any]) -> dict[str, Any]:
        return {**task, **self._common()}

    def _common(self) -> dict[str, Any]:
        return {"strict": self.strict, "mutant": self.mutant}

    def _worker(self) -> pool.Worker:
        return pool.Worker(_WORKER, self.limit, _MODELS_PER_PROCESS)

    def _enough(self) -> bool:
        late = bool(self.seconds) and time.monotonic() - self._began > self.seconds
        return late or (self.stop_at_first and bool(self.failures))

    def _count(self, answer: dict[str, Any] | Lost) -> None:
        if not self.console.is_terminal and sum(self.counts.values()) % 100 == 99:
            self.console.print(f"{sum(self.counts.values()) + 1} models, {len(self.failures)} failures")
        if isinstance(answer, Lost):
            self.counts[answer.kind] += 1
            return
        outcome = answer["outcome"]
        self.counts[f"{outcome}: {answer['kind']}" if outcome in {"failed", "torch"} else outcome] += 1
        if outcome == "broken":
            self.console.print(answer["detail"], markup=False)
        self.cpu_seconds += answer["cpu_seconds"]
        self._ops += answer.get("ops", 0)
        self._on_openvino += answer.get("ops", 0) * answer.get("coverage", 0.0)

    def _after(self, task: dict[str, Any], answer: dict[str, Any] | Lost, ask: pool.Ask) -> None:
        kind = failure_kind(answer)
        if not kind or kind in self.ignored:
            return
        if self.mutant and failure_kind(ask({**task, "mutant": ""})):
            # It also fails without the deliberate fault.
            return
        data = answer.get("program") if isinstance(answer, dict) else None
        if data is None:
            written = ask({**task, "only_write": True})
            data = written.get("program") if isinstance(written, dict) else None
        if data is None:
            self._keep(Failure(task["name"], kind, _detail(answer), {}, f"{kind} | not written"))
            return
        program = Program.from_dict(data)
        if self.shrink_seconds:
            program = shrink(program, answer, ask, self._common(), self.shrink_seconds)
            again = ask({"program": program.to_dict(), **self._common()})
            if failure_kind(again):
                answer = again
        detail = _detail(answer)
        title = f"{task['name']} {kind}: {detail}\n{reduce.mode_text(program.mode)}"
        reply = ask({"program": program.to_dict(), "script": title})
        text = (reply.get("script") if isinstance(reply, dict) else "") or program.source()
        failure = Failure(task["name"], kind, detail, program.to_dict(), reduce.signature(program, kind), text)
        self._keep(failure)

    def _keep(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.console.print(f"{failure.name} {failure.kind}: {failure.detail}"[:300], markup=False, highlight=False)
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{failure.name}.py").write_text(failure.script, encoding="utf-8")
        case = {"kind": failure.kind, "detail": failure.detail, "program": failure.program}
        (self.out / f"{failure.name}.json").write_text(json.dumps(case, indent=1) + "\n", encoding="utf-8")


def _detail(answer: dict[str, Any] | Lost) -> str:
    return answer.reason if isinstance(answer, Lost) else answer["detail"]
