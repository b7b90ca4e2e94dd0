"""The rounds: each contender in turn is a new process, with nothing else running."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.startups.models import ANSWER, SOURCES, TOLERANCE
from benchmarks.startups.program import Order

SCRIPTS = Path(__file__).resolve().parents[2]
PATIENCE = 900.0
BARE = ("bare-ir", "bare-blob")
OURS_COLD, OURS_WARM = "ours-cold", "ours-warm"


@dataclass(frozen=True)
class Contender:
    """How one is started.

    Attributes:
        program: Name in program.py.
        cache: Its cache folder: ``none``, ``fresh`` (empty each time) or ``warm`` (filled before).
        inductor: The same for Inductor's.
    """

    program: str
    cache: str = "none"
    inductor: str = "fresh"


# The order of the turns and of the table.
CONTENDERS: dict[str, Contender] = {
    "bare-ir": Contender("bare-ir"),
    "bare-blob": Contender("bare-blob"),
    "eager": Contender("eager"),
    "inductor-cold": Contender("inductor"),
    "inductor-warm": Contender("inductor", inductor="warm"),
    "stock-openvino": Contender("stock"),
    "stock-openvino-warm": Contender("stock", cache="warm", inductor="warm"),
    OURS_COLD: Contender("ours", cache="fresh"),
    OURS_WARM: Contender("ours", cache="warm"),
    "ours-warm-handler": Contender("ours-handler", cache="warm"),
}


@dataclass
class Result:
    """The figures of one contender on one model.

    Attributes:
        rounds: Of each: total, phases, facts, difference, wrong.
        failed: Why it has no further rounds.
    """

    model: str
    contender: str
    rounds: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""

    @property
    def wrong(self) -> bool:
        """Whether any answer is wrong."""
        return any(one["wrong"] for one in self.rounds)

    @property
    def cache(self) -> dict[str, Any]:
        """The cache section of the package's report in the last round; empty for other contenders."""
        facts: dict[str, Any] = self.rounds[-1]["facts"].get("cache", {}) if self.rounds else {}
        return facts

    @property
    def note(self) -> str:
        """The program's note in the last round."""
        return str(self.rounds[-1]["facts"].get("note", "")) if self.rounds else ""


class ProgramError(RuntimeError):
    """A contender did not answer; the message holds its last output."""


class Rounds:
    """All contenders on one model.

    Args:
        model: Name in `SOURCES`.
        names: Of `CONTENDERS`.
        work: An empty folder.
        console: Where progress goes.
    """

    def __init__(self, model: str, names: Sequence[str], work: Path, console: Console) -> None:
        self.model, self.work, self.console = model, work, console
        self.results = {name: Result(model, name) for name in names}
        self.weights = SOURCES[model].weights()
        self._fresh = 0

    def run(self, rounds: int) -> list[Result]:
        """Prepares, fills the caches and runs all rounds; a contender that failed is not tried again."""
        with self.console.status(f"{self.model}: eager's answer, and a ready model"):
            _python(["benchmarks.startups.prepare", self.model, str(self.work)], {})
        self.expected = torch.load(self.work / ANSWER, weights_only=True)
        filled: set[Contender] = set()
        for name, result in self.results.items():
            contender = CONTENDERS[name]
            # Two contenders of ours share one cache.
            alike = Contender(contender.program.removesuffix("-handler"), contender.cache, contender.inductor)
            if "warm" in (contender.cache, contender.inductor) and alike not in filled:
                filled.add(alike)
                self._turn(result, f"{self.model}: filling the cache of {name}", counts=False)
        for turn in range(1, rounds + 1):
            for name, result in self.results.items():
                self._turn(result, f"{self.model}: round {turn}/{rounds}, {name}")
        return list(self.results.values())

    def _turn(self, result: Result, title: str, counts: bool = True) -> None:
        if result.failed:
            return
        try:
            with self.console.status(title):
                one = self._start(result.contender)
        except ProgramError as error:
            result.failed = str(error)
            self.console.print(f"[red]{title}: failed", highlight=False, soft_wrap=True)
            self.console.print(result.failed, markup=False, highlight=False, soft_wrap=True)
            return
        if counts:
            result.rounds.append(one)
        wrong = ", WRONG" if one["wrong"] else ""
        self.console.print(f"{title}: {one['total']:.2f} s{wrong}", markup=False, highlight=False, soft_wrap=True)

    def _start(self, name: str) -> dict[str, Any]:
        contender = CONTENDERS[name]
        answer = self.work / "answer-of-contender.pt"
        answer.unlink(missing_ok=True)
        environment = {"TORCHINDUCTOR_CACHE_DIR": self._folder(f"{contender.program}-inductor", contender.inductor)}
        order: Order = {
            "contender": contender.program,
            "model": self.model,
            "weights": str(self.weights),
            "folder": str(self.work),
            "cache": self._folder(contender.program.removesuffix("-handler"), contender.cache),
            "answer": str(answer),
            "started": time.time(),
        }
        said = _python(["benchmarks.startups.program", json.dumps(order)], environment)
        one: dict[str, Any] = json.loads(said.splitlines()[-1])
        one["difference"] = self._difference(torch.load(answer, weights_only=True))
        one["wrong"] = not one["difference"] <= TOLERANCE
        return one

    def _folder(self, program: str, kind: str) -> str:
        if kind == "none":
            return ""
        self._fresh += kind == "fresh"
        name = f"{program}-{self._fresh}" if kind == "fresh" else f"{program}-warm"
        return str(self.work / name)

    def _difference(self, answer: list[torch.Tensor]) -> float:
        """Greatest absolute difference from eager's answer; NaN if the shapes differ or any value is NaN."""
        if [tensor.shape for tensor in answer] != [tensor.shape for tensor in self.expected]:
            return float("nan")
        differences = [float((a - b).abs().max()) for a, b in zip(answer, self.expected, strict=True)]
        return float("nan") if any(map(math.isnan, differences)) else max(differences)


def _python(arguments: list[str], environment: dict[str, str]) -> str:
    command = [sys.executable, "-W", "ignore", "-m", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=SCRIPTS,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ProgramError(f"no answer in {PATIENCE:.0f} s") from error
    if done.returncode:
        # The traceback ends with the error.
        last = done.stderr.strip().splitlines()[-30:]
        why = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
        raise ProgramError("\n".join([*last, why]))
    return done.stdout
