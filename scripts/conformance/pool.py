"""Workers in processes of their own: a crash or a hang costs one case and a restart."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conformance.outcome import Outcome

_WORKER = Path(__file__).with_name("worker.py")
# Compiled code and Dynamo's caches grow; a fresh process starts in seconds.
_TASKS_PER_PROCESS = 150
_STARTUP_SECONDS = 120


class _Process:
    def __init__(self) -> None:
        self.done = 0
        self.popen = subprocess.Popen(
            [sys.executable, str(_WORKER)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def ask(self, task: dict[str, Any], seconds: float) -> Outcome:
        assert self.popen.stdin is not None and self.popen.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.popen.kill()

        timer = threading.Timer(seconds + (0 if self.done else _STARTUP_SECONDS), stop)
        timer.start()
        try:
            self.popen.stdin.write(json.dumps(task) + "\n")
            self.popen.stdin.flush()
            line = self.popen.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        self.done += 1
        if line:
            answer = json.loads(line)
            return Outcome(answer["outcome"], tuple(answer["reasons"]))
        status = self.popen.wait()
        if late.is_set():
            return Outcome("TIMEOUT", (f"no answer within {seconds:.0f} s",))
        return Outcome("CRASH", (f"the process ended with status {status}",))

    def close(self) -> None:
        self.popen.kill()
        self.popen.communicate()


def run_all(
    tasks: Sequence[dict[str, Any]], jobs: int, seconds: float, done: Callable[[dict[str, Any], Outcome], None]
) -> None:
    """Runs tasks in worker processes.

    Args:
        tasks: In this order, as workers become free.
        jobs: Worker processes.
        seconds: Limit for one task; what takes longer is a `TIMEOUT`.
        done: Told each outcome; called from several threads, one at a time.
    """
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    lock = threading.Lock()

    def serve() -> None:
        process: _Process | None = None
        try:
            while True:
                try:
                    task = waiting.get_nowait()
                except queue.Empty:
                    return
                process = process or _Process()
                outcome = process.ask(task, seconds)
                if process.popen.poll() is not None or process.done >= _TASKS_PER_PROCESS:
                    process.close()
                    process = None
                with lock:
                    done(task, outcome)
        finally:
            if process is not None:
                process.close()

    threads = [threading.Thread(target=serve) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
