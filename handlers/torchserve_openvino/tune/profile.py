"""First stage: each way to compute, in a process of its own; proven, then timed in turns with the others."""

import base64
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from torchserve_openvino.bench.bodies import Body
from torchserve_openvino.bench.machine import available_memory
from torchserve_openvino.bench.processes import end_piped, signals_later
from torchserve_openvino.errors import TorchServeOpenVINOError
from torchserve_openvino.tune.candidates import ComputeSettings
from torchserve_openvino.tune.proof import ModelAnswer, difference

Tell = Callable[[str], None]
_ROUNDS = 5
# Calls of a round take about so long: single short ones are noisy.
_LEAST_MS = 60.0
# Memory that candidates have to leave to the machine.
RESERVE = 300 * 2**20
_GUARD_SECONDS = 0.2
_WARM_CALLS, _MOST_CALLS = 2, 8


@dataclass
class Profile:
    """What the first stage knows.

    Attributes:
        times: Milliseconds of a call by batch size, for each engine that passed.
        rejected: Why an engine is out.
        rounds: Milliseconds of a call in each round by batch size; an interrupted run does not keep them.
        options: What other values of further keys did, in words.
        sizes: Sizes of the requests as `RequestSizes.to_plain` has them; empty where the model's inputs are unknown.
    """

    times: dict[ComputeSettings, dict[int, float]] = field(default_factory=dict)
    rejected: dict[ComputeSettings, str] = field(default_factory=dict)
    rounds: dict[ComputeSettings, dict[int, list[float]]] = field(default_factory=dict, compare=False)
    options: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)


class WorkerFailedError(TorchServeOpenVINOError):
    """A process of the first stage could not load the archive, or ended."""


class Process:
    """The other end of `archive_worker.py`.

    Args:
        archive: The .mar.
        bodies: The requests.
        environment: Further variables of the process.
        reserve: Bytes of memory that have to stay free; the process is ended when fewer are left.

    Raises:
        WorkerFailedError: The archive could not be loaded; the message says why.
    """

    def __init__(
        self, archive: Path, bodies: Sequence[Body], environment: Mapping[str, str], reserve: int = RESERVE
    ) -> None:
        self._reserve, self._starved = reserve, ""
        # The process is killed in the end, and what it unpacks goes with its folder.
        self._scratch = tempfile.TemporaryDirectory(prefix="torchserve-openvino-tune-", ignore_cleanup_errors=True)
        with contextlib.ExitStack() as undo:
            # An interrupt within would leave a process without anybody who ends it.
            with signals_later():
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "torchserve_openvino.tune.archive_worker"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                    env={**os.environ, **environment, "TMPDIR": self._scratch.name}, start_new_session=True,
                )  # fmt: skip
                undo.callback(self.close)
            threading.Thread(target=self._guard, daemon=True).start()
            self.report: dict[str, Any] = self._ask(
                {"archive": str(archive), "bodies": [body.named for body in bodies]}
            )["report"]
            undo.pop_all()

    @property
    def memory(self) -> int:
        """Bytes that the process takes, without what it shares; 0 once it ended."""
        try:
            return int(psutil.Process(self._process.pid).memory_full_info().uss)
        except (psutil.Error, AttributeError):
            return 0

    def answers(self) -> list[ModelAnswer]:
        """Returns the answer to each request."""
        reply = self._ask({"do": "answers"})
        # Requests may have fallen back where the warm-up did not.
        self.report, replies = reply["report"], reply["answers"]
        return [
            ModelAnswer(reply["status"], reply["content_type"], base64.b64decode(reply["body"])) for reply in replies
        ]

    def sizes(self) -> dict[str, Any]:
        """Returns the sizes of the requests, as `Observer.to_plain` has them, once they were answered."""
        return dict(self._ask({"do": "sizes"})["sizes"])

    def call(self, size: int, calls: int, first: int) -> list[float]:
        """Returns the milliseconds of calls with so many requests.

        Args:
            size: Requests of each call.
            calls: Number of calls.
            first: Position of the first request; equal positions are equal requests in all processes.
        """
        command = {"do": "call", "size": size, "calls": calls, "first": first}
        return [float(value) for value in self._ask(command)["ms"]]

    def close(self) -> None:
        """Ends the process."""
        end_piped(self._process)
        self._scratch.cleanup()

    def _guard(self) -> None:
        """Ends the process before the system ends others for lack of memory."""
        while self._process.poll() is None:
            if (left := available_memory()) < self._reserve:
                self._starved = f"too little memory: {left / 1e6:.0f} MB were left beside it"
                self._process.kill()
                return
            time.sleep(_GUARD_SECONDS)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        if self._process.stdin is None or self._process.stdout is None:
            raise WorkerFailedError("the process has no pipes")
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            # The guard kills first, and then its reason is there.
            if self._starved:
                raise WorkerFailedError(self._starved)
            raise WorkerFailedError(f"the process ended with {self._process.poll()} and no answer")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerFailedError(reply["error"])
        return reply


def profile(
    archives: Mapping[ComputeSettings, Path],
    expected: Sequence[ModelAnswer],
    bodies: Sequence[Body],
    sizes: Sequence[int],
    environment: Mapping[str, str],
    tell: Tell,
    baseline: ComputeSettings,
) -> Profile:
    """Proves and times engines.

    Args:
        archives: The archive of each engine, whose YAML says how it computes.
        expected: Eager PyTorch's answers to the requests.
        bodies: The requests.
        sizes: Batch sizes to time.
        environment: Of each process.
        tell: Gets a line of progress.
        baseline: The one whose fallbacks others may have too.

    Returns:
        The times of those whose answers are right; all are timed in turns, so that each sees the same minutes.
    """
    result = Profile()
    with ExitStack() as stack:
        running: dict[ComputeSettings, Process] = {}
        for engine, archive in archives.items():
            keys = "".join(f", {option}" for option in engine.options)
            tell(f"loading {engine.precision}, {engine.threads} thread(s), {engine.streams} stream(s){keys}")
            if lack := _lacks_memory(running.values()):
                result.rejected[engine] = lack
                continue
            try:
                process = stack.enter_context(Process(archive, bodies, environment))
                wrong = wrong_answer(expected, process.answers(), engine.precision, bodies)
            except WorkerFailedError as error:
                result.rejected[engine] = str(error)
                continue
            if wrong:
                result.rejected[engine] = wrong
                process.close()
            else:
                running[engine] = process
        allowed = fallbacks_in(running[baseline].report) if baseline in running else None
        for engine, process in list(running.items()) if allowed is not None else ():
            if further := further_fallback(fallbacks_in(process.report), allowed or {}):
                result.rejected[engine] = further
                process.close()
                del running[engine]
        times: dict[ComputeSettings, dict[int, list[float]]] = {
            engine: {size: [] for size in sizes} for engine in running
        }
        # All engines answer the same requests in each round: otherwise their lengths would decide.
        calls = dict.fromkeys(sizes, _WARM_CALLS)
        warm: dict[int, list[float]] = {size: [] for size in sizes}
        for turn in range(_ROUNDS + 1):
            tell(f"timing {len(running)} ways to compute, round {turn} of {_ROUNDS}")
            for engine, process in list(running.items()):
                for size in sizes:
                    try:
                        durations = process.call(size, calls[size], turn * calls[size] * size)
                    except WorkerFailedError as error:
                        result.rejected[engine] = str(error)
                        del running[engine], times[engine]
                        break
                    # The first round warms caches up.
                    if turn:
                        times[engine][size].append(statistics.fmean(durations))
                    else:
                        warm[size].append(durations[-1])
            if not turn:
                usual = {size: max(0.1, statistics.median(values)) for size, values in warm.items() if values}
                calls = {size: max(1, min(_MOST_CALLS, int(_LEAST_MS / ms))) for size, ms in usual.items()}
    result.rounds = times
    result.times = {
        engine: {size: statistics.median(values) for size, values in by_size.items()}
        for engine, by_size in times.items()
    }
    return result


def _lacks_memory(running: Iterable[Process]) -> str | None:
    """Returns that another process like these has no room, as a reason; None if it has."""
    largest, left = max((process.memory for process in running), default=0), available_memory()
    if largest <= left - RESERVE:
        return None
    return f"too little memory: others like it take up to {largest / 1e6:.0f} MB, and {left / 1e6:.0f} MB are left"


def fallbacks_in(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a report says to run outside OpenVINO, each with its reason; not what is faster there."""
    return {
        f"{fallback.get('kind')} {fallback.get('op') or ''}".strip(): str(fallback.get("reason") or "").partition("\n")[
            0
        ][:200]
        for fallback in report.get("fallbacks") or ()
        if fallback.get("kind") != "slower"
    }


def further_fallback(fallbacks: Mapping[str, str], allowed: Mapping[str, str]) -> str | None:
    """Returns the first fallback that is not allowed, as a reason; None if there is none."""
    further = [f"{name}: {reason}" for name, reason in fallbacks.items() if name not in allowed]
    return f"it runs outside OpenVINO what the present configuration does not: {further[0]}" if further else None


def wrong_answer(
    expected: Sequence[ModelAnswer], answers: Sequence[ModelAnswer], precision: str, bodies: Sequence[Body]
) -> str | None:
    """Returns which answer is wrong and how; None if all are right."""
    for body, before, after in zip(bodies, expected, answers, strict=True):
        if flaw := difference(before, after, precision):
            return f"wrong answer to {body.path.name}: {flaw}"
    return None
