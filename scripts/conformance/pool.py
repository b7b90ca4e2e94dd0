"""Worker processes: a crash or a hang costs one case and a restart."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conformance.outcome import Outcome
from isolation import pool
from isolation.process import Lost

_WORKER = Path(__file__).with_name("worker.py")
_TASKS_PER_PROCESS = 150


def run_all(
    tasks: Sequence[dict[str, Any]], jobs: int, seconds: float, done: Callable[[dict[str, Any], Outcome], None]
) -> None:
    """Runs tasks in worker processes.

    Args:
        tasks: Started in this order as workers become free.
        jobs: Number of worker processes.
        seconds: Limit for one task; beyond it the outcome is `TIMEOUT`.
        done: Called with each outcome, from several threads but one at a time.
    """

    def tell(task: dict[str, Any], answer: dict[str, Any] | Lost) -> None:
        if isinstance(answer, Lost):
            done(task, Outcome(answer.kind, (answer.reason,)))
        else:
            done(task, Outcome(answer["outcome"], tuple(answer["reasons"])))

    pool.run_all(tasks, jobs, lambda: pool.Worker(_WORKER, seconds, _TASKS_PER_PROCESS), tell)
