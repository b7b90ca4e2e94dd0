"""Runs a model with OpenVINO's own torch.compile backend in a separate process, and reports what it does."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchserve_openvino.config import load_serving_config
from torchserve_openvino.packaging.archive import read_packed_config

if TYPE_CHECKING:
    from torchserve_openvino.doctor.target import TargetSpec

# The options as given in the YAML, and with the one that OpenVINO's documentation recommends where they fail.
VARIANTS: Mapping[str, Mapping[str, Any]] = {"as given": {}, "aot_autograd: true": {"aot_autograd": True}}
_OUTCOMES = {
    "refused": "raises: in TorchServe the worker reports Healthy, and each request gets this error",
    "eager": "silently runs eager PyTorch; nothing runs on OpenVINO",
    "inductor": "silently runs Inductor's code; nothing runs on OpenVINO",
    "partial": "runs a part on OpenVINO, the rest in eager PyTorch",
    "openvino": "runs on OpenVINO",
    "timed_out": "did not finish in time",
    "crashed": "ends the process",
}
_TAIL = 2000


@dataclass(frozen=True)
class StockRun:
    """One run of OpenVINO's own backend.

    Attributes:
        outcome: ``refused``, ``eager``, ``inductor``, ``partial``, ``openvino``, ``timed_out`` or ``crashed``.
        error: Type and first line of the exception, or how the process ended.
        failures: Why something runs in eager PyTorch, which it logs at DEBUG only; after a crash, its last output.
        ops_total: Operators in the graphs that it received.
        ops_offloaded: Those that ran on OpenVINO.
        partitions: Subgraphs that it compiled.
        unsupported: Operators that its support table lacks, with their number of nodes.
        first_call_seconds: Compilation included; None without an answer.
        later_call_seconds: Median of five later calls.
        max_abs: Largest difference from eager PyTorch; None without an answer, or where it is not finite.
        max_abs_other_input: The same for the second input.
        values_compared: How many of the two inputs were compared: eager PyTorch may refuse the second, made-up one.
        first_answer_overwritten: Whether the second call changed what the first had returned.
    """

    outcome: str
    error: str = ""
    failures: list[str] = field(default_factory=list)
    ops_total: int = 0
    ops_offloaded: int = 0
    partitions: int = 0
    unsupported: dict[str, int] = field(default_factory=dict)
    first_call_seconds: float | None = None
    later_call_seconds: float | None = None
    max_abs: float | None = None
    max_abs_other_input: float | None = None
    values_compared: int = 0
    first_answer_overwritten: bool = False

    def text(self) -> str:
        """A few lines for a terminal."""
        lines = [_OUTCOMES[self.outcome]]
        if self.error:
            lines.append(self.error)
        lines += self.failures[:3]
        if self.ops_total:
            share = f"{self.ops_offloaded} of {self.ops_total} operators on OpenVINO"
            lines.append(f"{share}, {self.partitions} partitions")
        if self.unsupported:
            names = ", ".join(f"{name} ({count})" for name, count in self.unsupported.items())
            lines.append(f"not in its support table: {names}")
        if self.later_call_seconds is not None:
            later = f"{1e3 * self.later_call_seconds:.2f} ms"
            lines.append(f"first call {self.first_call_seconds:.2f} s, later ones {later}")
            known = [difference for difference in (self.max_abs, self.max_abs_other_input) if difference is not None]
            worst = (
                f"{max(known):.3g} at most"
                if len(known) == self.values_compared
                else "infinite, or NaN in only one of the two"
            )
            lines.append(f"difference from eager: {worst}")
        if self.first_answer_overwritten:
            lines.append("the second call overwrote the answer of the first")
        return "\n".join(lines)


@dataclass(frozen=True)
class StockVerdict:
    """What OpenVINO's own backend does, for each of `VARIANTS`."""

    runs: Mapping[str, StockRun]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: ``{"as given": {"outcome": ...}, "aot_autograd: true": {...}}``."""
        return {name: dataclasses.asdict(run) for name, run in self.runs.items()}

    def text(self) -> str:
        """A few lines for each run."""
        parts = []
        for name, run in self.runs.items():
            first, *rest = run.text().splitlines()
            parts.append("\n".join([f'torch.compile(backend="openvino"), {name}: {first}', *(f"  {r}" for r in rest)]))
        return "\n".join(parts)


def what_upstream_does(spec: "TargetSpec", *, timeout: float = 300.0) -> StockVerdict:
    """Runs the model through OpenVINO's own backend, once for each of `VARIANTS`.

    Args:
        spec: What the process needs to load the model.
        timeout: Seconds that each run may take, including loading.
    """
    runs = {}
    for name, extra in VARIANTS.items():
        with tempfile.TemporaryDirectory(prefix="torchserve-openvino-stock-") as folder:
            answer = Path(folder) / "answer.json"
            request = {"spec": dataclasses.asdict(spec), "extra": extra, "answer": str(answer), "caches": folder}
            command = [sys.executable, "-m", "torchserve_openvino.doctor.bisecting.stock_worker", json.dumps(request)]
            runs[name] = run_worker(command, answer, timeout=timeout)
    return StockVerdict(runs)


def run_worker(command: Sequence[str], answer: Path, *, timeout: float) -> StockRun:
    """Runs a process that writes its result, a `StockRun` as JSON, to a file.

    Args:
        command: The command line; at the timeout its child processes are killed too.
        answer: The file with the result.
        timeout: Seconds that it may take.
    """
    with tempfile.TemporaryFile() as log:
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True) as process:
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                return StockRun("timed_out", error=f"stopped after {timeout:g} s")
            finally:
                if process.poll() is None:
                    # The whole group, because Inductor's compilers are child processes. Ctrl-C does not reach it.
                    os.killpg(process.pid, signal.SIGKILL)
        if code == 0 and answer.exists():
            return StockRun(**json.loads(answer.read_text(encoding="utf-8")))
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - _TAIL))
        output = log.read().decode("utf-8", "replace").strip().splitlines()
    how = signal.strsignal(-code) if code < 0 else f"exit code {code}"
    return StockRun("crashed", error=f"{how}: {output[-1] if output else 'no output'}", failures=output[-3:-1])


def given_options(path: Path, config: Path | None) -> tuple[dict[str, Any] | None, bool | None]:
    """Returns the unchecked options and ``dynamic`` as TorchServe would pass them on; None for what the YAML omits.

    Args:
        path: The model file; an archive contains a YAML.
        config: The YAML to use instead of the archive's; None for the latter.
    """
    stated = config if config is not None else _config_of(path)
    if stated is None:
        return None, None
    pt2 = load_serving_config(stated, check_device=False).pt2
    return (dict(pt2.options) or None) if pt2.is_openvino else None, pt2.dynamic


def _config_of(path: Path) -> Mapping[str, Any] | None:
    if path.suffix != ".mar":
        return None
    model, source = read_packed_config(path)
    return source.data if model.get("configFile") else None
