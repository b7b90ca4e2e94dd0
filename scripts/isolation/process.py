"""One worker process: a JSON line to it, a JSON line back."""

import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STARTUP_SECONDS = 120


@dataclass(frozen=True)
class Lost:
    """A task without an answer.

    Attributes:
        kind: ``TIMEOUT`` or ``CRASH``.
        reason: In words.
    """

    kind: str
    reason: str


class Process:
    """A Python script that answers each line of JSON with one.

    Args:
        worker: The script.

    Attributes:
        done: Number of tasks so far.
    """

    def __init__(self, worker: Path) -> None:
        self.done = 0
        self.popen = subprocess.Popen(
            [sys.executable, str(worker)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def ask(self, task: dict[str, Any], seconds: float) -> dict[str, Any] | Lost:
        """Sends a task and waits for its answer.

        Args:
            task: JSON-serializable.
            seconds: Until the process is killed; the first task may take longer, for imports.
        """
        assert self.popen.stdin is not None and self.popen.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.popen.kill()

        limit = seconds + (0 if self.done else _STARTUP_SECONDS)
        timer = threading.Timer(limit, stop)
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
        # A process that ends while it writes leaves part of a line.
        if line.endswith("\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        status = self.popen.wait()
        if late.is_set():
            return Lost("TIMEOUT", f"no answer within {limit:.0f} s")
        return Lost("CRASH", f"the process ended with status {status}")

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.popen.poll() is None

    def close(self) -> None:
        """Ends the process."""
        self.popen.kill()
        self.popen.communicate()
