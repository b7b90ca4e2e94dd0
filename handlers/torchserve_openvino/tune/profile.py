"""First stage: each way to compute, in a process of its own; proven, then timed in turns with the others."""

import base64
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchserve_openvino.bench.bodies import Body
from torchserve_openvino.errors import TorchServeOpenVINOError
from torchserve_openvino.tune.candidates import Engine
from torchserve_openvino.tune.proof import Answer, difference

Tell = Callable[[str], None]
_ROUNDS = 5
# Calls of a round take about so long: single short ones are noisy.
_LEAST_MS = 60.0
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
        memory: Bytes of the process that computed in this way.
    """

    times: dict[Engine, dict[int, float]] = field(default_factory=dict)
    rejected: dict[Engine, str] = field(default_factory=dict)
    rounds: dict[Engine, dict[int, list[float]]] = field(default_factory=dict, compare=False)
    options: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    memory: dict[Engine, int] = field(default_factory=dict)


class WorkerFailedError(TorchServeOpenVINOError):
    """A process of the first stage could not load the archive, or ended."""


class Process:
    """The other end of `worker.py`.

    Args:
        archive: The .mar.
        bodies: The requests.
        environment: Of the process.

    Raises:
        WorkerFailedError: The archive could not be loaded; the message says why.
    """

    def __init__(self, archive: Path, bodies: Sequence[Body], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torchserve_openvino.tune.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=dict(environment),
        )  # fmt: skip
        try:
            self.report: dict[str, Any] = self._ask(
                {"archive": str(archive), "bodies": [body.named for body in bodies]}
            )["report"]
        except BaseException:
            self.close()
            raise

    def answers(self) -> list[Answer]:
        """Returns the answer to each request."""
        replies = self._ask({"do": "answers"})["answers"]
        return [Answer(each["status"], each["content_type"], base64.b64decode(each["body"])) for each in replies]

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
        return [float(each) for each in self._ask(command)["ms"]]

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

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
            raise WorkerFailedError(f"the process ended with {self._process.poll()} and no answer")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerFailedError(reply["error"])
        return reply


def profile(
    archives: Mapping[Engine, Path],
    expected: Sequence[Answer],
    bodies: Sequence[Body],
    sizes: Sequence[int],
    environment: Mapping[str, str],
    tell: Tell,
) -> Profile:
    """Proves and times engines.

    Args:
        archives: The archive of each engine, whose YAML says how it computes.
        expected: Eager PyTorch's answers to the requests.
        bodies: The requests.
        sizes: Batch sizes to time.
        environment: Of each process.
        tell: Gets a line of progress.

    Returns:
        The times of those whose answers are right; all are timed in turns, so that each sees the same minutes.
    """
    result = Profile()
    with ExitStack() as stack:
        running: dict[Engine, Process] = {}
        for engine, archive in archives.items():
            further = "".join(f", {option}" for option in engine.options)
            tell(f"loading {engine.precision}, {engine.threads} thread(s), {engine.streams} stream(s){further}")
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
        times: dict[Engine, dict[int, list[float]]] = {engine: {size: [] for size in sizes} for engine in running}
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
        engine: {size: statistics.median(values) for size, values in each.items()} for engine, each in times.items()
    }
    return result


def wrong_answer(
    expected: Sequence[Answer], answers: Sequence[Answer], precision: str, bodies: Sequence[Body]
) -> str | None:
    """Returns which answer is wrong and how; None if all are right."""
    for body, before, after in zip(bodies, expected, answers, strict=True):
        if flaw := difference(before, after, precision):
            return f"wrong answer to {body.path.name}: {flaw}"
    return None
