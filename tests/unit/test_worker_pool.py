"""Worker processes and the threads that share their tasks."""

from pathlib import Path

import pytest

from isolation import pool
from isolation.process import Lost, Process

ECHO = """
import sys
for line in sys.stdin:
    print(line, end="", flush=True)
"""
PARTIAL = """
import os, sys
sys.stdin.readline()
print('{"answer": 1', end="", flush=True)
os._exit(3)
"""


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    path = tmp_path / "echo.py"
    path.write_text(ECHO)
    return path


def test_part_of_a_line_is_no_answer(tmp_path: Path) -> None:
    script = tmp_path / "partial.py"
    script.write_text(PARTIAL)
    process = Process(script)
    assert process.ask({}, 10.0) == Lost("CRASH", "the process ended with status 3")
    process.close()


@pytest.mark.parametrize("kind", ["done", "after", "worker"])
def test_an_error_of_a_callback_ends_the_run(echo: Path, kind: str) -> None:
    seen = []

    def worker() -> pool.Worker:
        if kind == "worker":
            raise RuntimeError("worker")
        return pool.Worker(echo, 10.0, 10)

    def done(task, answer) -> None:
        seen.append(answer)
        if kind == "done" and len(seen) == 3:
            raise RuntimeError("done")

    def after(task, answer, ask) -> None:
        if kind == "after" and task["number"] == 3:
            raise RuntimeError("after")

    with pytest.raises(RuntimeError, match=kind):
        pool.run_all([{"number": i} for i in range(1, 50)], 1, worker, done, after)
    assert len(seen) == {"done": 3, "after": 2, "worker": 0}[kind]
