"""Several worker processes that share a list of tasks."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from isolation.process import Lost, Process

Task = dict[str, Any]
Ask = Callable[[Task], dict[str, Any] | Lost]


class Worker:
    """A worker process that is replaced when it has ended, or after a number of tasks.

    Args:
        script: What the process runs.
        seconds: Limit for one task.
        tasks_per_process: Limited, since compiled code and Dynamo's caches grow; a fresh process starts in seconds.
    """

    def __init__(self, script: Path, seconds: float, tasks_per_process: int) -> None:
        self._script = script
        self._seconds = seconds
        self._limit = tasks_per_process
        self._process: Process | None = None

    def ask(self, task: Task) -> dict[str, Any] | Lost:
        """Runs one task."""
        self._process = self._process or Process(self._script)
        answer = self._process.ask(task, self._seconds)
        if not self._process.alive or self._process.done >= self._limit:
            self.close()
        return answer

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.close()
            self._process = None


def run_all(
    tasks: Iterable[Task],
    jobs: int,
    worker: Callable[[], Worker],
    done: Callable[[Task, dict[str, Any] | Lost], None],
    after: Callable[[Task, dict[str, Any] | Lost, Ask], None] | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Runs tasks in worker processes.

    Args:
        tasks: Started in this order, as workers become free.
        jobs: Number of worker processes.
        worker: Makes one.
        done: Called with each answer; called from several threads, one at a time.
        after: Called before ``done``, in the worker's own thread; may ask the same worker further tasks.
        enough: Whether no further task is to be started.

    Raises:
        BaseException: The first error of a callback or a worker; no task is started after it.
    """
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            with contextlib.closing(worker()) as own:
                while not failures:
                    try:
                        task = waiting.get_nowait()
                    except queue.Empty:
                        return
                    if enough():
                        return
                    answer = own.ask(task)
                    if after is not None:
                        after(task, answer, own.ask)
                    with lock:
                        done(task, answer)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
