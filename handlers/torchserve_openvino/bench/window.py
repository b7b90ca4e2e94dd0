"""One measured window: requests from a process of their own, and what else the machine did meanwhile."""

import contextlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import psutil

from torchserve_openvino.bench.client import Plan
from torchserve_openvino.bench.processes import end_piped, signals_later
from torchserve_openvino.bench.statistics import QuantileClaim, claim_quantile, grows
from torchserve_openvino.errors import TorchServeOpenVINOError

_CLIENT = [sys.executable, "-m", "torchserve_openvino.bench.client"]
# A window is disturbed where the client sent its requests so late at the median, or other processes (or, by steal
# time, other guests of the host) took so much of a core.
_LATE_MS = 5.0
_OTHER_CORES = 0.35


class LoadClientError(TorchServeOpenVINOError):
    """The load client ended without a result."""


@dataclass(frozen=True)
class Limit:
    """What must hold.

    Attributes:
        milliseconds: Limit of the latency; infinite for none.
        quantile: Share of the requests that must be in time.
        first_bytes: Limit for the first bytes of streamed answers, in milliseconds; infinite for none.
    """

    milliseconds: float = math.inf
    quantile: float = 0.99
    first_bytes: float = math.inf


@dataclass(frozen=True)
class MeasuredWindow:
    """One window.

    Attributes:
        rate: Requests/s that were sent; of a closed loop, that were answered.
        limit: What had to hold.
        latencies: Milliseconds of each request from its due time, NaN for failed ones.
        first_bytes: Milliseconds until the first bytes of each streamed answer.
        failures: How often each failure happened.
        examples: The first failures.
        growing: Whether latencies grew over the window: the server can't keep up.
        disturbed: Why the window does not count; empty if it does.
        client_cores: Cores that the client took.
        server_cores: Cores that the server took.
        memory: Bytes of the server's processes after the window (USS where the system reports it, else RSS).
        seconds: Length of the counted time.
    """

    rate: float
    limit: Limit
    latencies: list[float]
    first_bytes: list[float]
    failures: Mapping[str, int]
    examples: list[str]
    growing: bool
    disturbed: str
    client_cores: float
    server_cores: float
    memory: int
    seconds: float

    @property
    def late(self) -> int:
        """Requests above one of the limits, failed ones included."""
        late = ~(np.asarray(self.latencies) <= self.limit.milliseconds)
        if self.first_bytes and math.isfinite(self.limit.first_bytes):
            late |= ~(np.asarray(self.first_bytes) <= self.limit.first_bytes)
        return int(late.sum())

    @property
    def claim(self) -> QuantileClaim:
        """What the window says about the limit's quantile."""
        return claim_quantile(len(self.latencies), min(self.late, len(self.latencies)), self.limit.quantile)

    @property
    def held(self) -> bool:
        """Whether no request failed, no more than the limit's share was late, and the queue did not grow."""
        allowed = (1 - self.limit.quantile) * len(self.latencies)
        return bool(self.latencies) and not self.failures and not self.growing and self.late <= allowed

    def percentile(self, share: float) -> float:
        """Returns a percentile of the latencies in milliseconds, failed requests as infinite ones."""
        values = np.nan_to_num(np.asarray(self.latencies), nan=math.inf)
        return float(np.quantile(values, share, method="higher")) if len(values) else math.nan

    def as_json(self) -> dict[str, Any]:
        """Returns the window without its single latencies, JSON-safe."""
        percentiles = {f"p{share:g}": self.percentile(share / 100) for share in (50, 90, 99)}
        return {
            "rate": self.rate, "requests": len(self.latencies), "late": self.late, "held": self.held,
            **{name: value if math.isfinite(value) else None for name, value in percentiles.items()},
            "failures": dict(self.failures), "examples": self.examples, "growing": self.growing,
            "disturbed": self.disturbed, "client_cores": round(self.client_cores, 3),
            "server_cores": round(self.server_cores, 3), "memory": self.memory, "seconds": self.seconds,
        }  # fmt: skip


def measure(plan: Plan, limit: Limit, root: int | None) -> MeasuredWindow:
    """Sends requests and returns what happened.

    Args:
        plan: What to send.
        limit: What must hold.
        root: The server's topmost process, whose processor time and memory are read; None where it is elsewhere.

    Raises:
        LoadClientError: The client ended without a result.
    """
    with contextlib.ExitStack() as stack:
        # Ctrl-C of the terminal must not reach it, as it would end with a traceback; the stack ends it.
        with signals_later():
            client = subprocess.Popen(
                _CLIENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            stack.callback(end_piped, client)
        _write(client, json.dumps(asdict(plan)))
        _read(client)
        before, start = _usage(root), time.monotonic()
        _write(client, "go")
        outcome = json.loads(_read(client))
        after, elapsed = _usage(root), time.monotonic() - start
    server = (after.server - before.server) / elapsed
    own = outcome["cpu_seconds"] / max(plan.seconds, 1e-9)
    others = max(0.0, (after.machine - before.machine) / elapsed - server - own) if root is not None else 0.0
    answered = [value for value in outcome["latencies"] if not math.isnan(value)]
    waiting = [plan.timeout * 1e3 if math.isnan(value) else value for value in outcome["latencies"]]
    # A client of a closed loop may wait for its last answer long after the counted time.
    ends = [due + ms / 1e3 for due, ms in zip(outcome["due"], outcome["latencies"], strict=True) if not math.isnan(ms)]
    return MeasuredWindow(
        rate=plan.rate or len(answered) / max([plan.seconds, *ends]),
        limit=limit,
        latencies=outcome["latencies"],
        first_bytes=outcome["first_bytes"],
        failures=outcome["failures"],
        examples=outcome["examples"],
        growing=bool(plan.rate) and grows(waiting, outcome["due"]),
        disturbed=_disturbance(outcome["delays"], others, (after.steal - before.steal) / elapsed),
        client_cores=own,
        server_cores=server,
        memory=after.memory,
        seconds=plan.seconds,
    )


def _disturbance(delays: list[float], others: float, steal: float) -> str:
    delay = float(np.median(delays)) if delays else 0.0
    if delay > _LATE_MS:
        return f"the client sent {delay:.1f} ms late"
    if others > _OTHER_CORES:
        return f"other processes took {others:.2f} cores"
    if steal > _OTHER_CORES:
        return f"the host took {steal:.2f} cores"
    return ""


@dataclass(frozen=True)
class _Usage:
    server: float
    machine: float
    steal: float
    memory: int


def _usage(root: int | None) -> _Usage:
    """Reads processor times in seconds and the memory of a process with its descendants in bytes."""
    times = psutil.cpu_times()._asdict()
    # Guests are counted in user and nice already.
    idle = {"idle", "iowait", "guest", "guest_nice", "steal"}
    busy = float(sum(value for key, value in times.items() if key not in idle))
    server, memory = 0.0, 0
    for process in _tree(root):
        try:
            used = process.cpu_times()
            server += used.user + used.system
            server += getattr(used, "children_user", 0.0) + getattr(used, "children_system", 0.0)
            memory += _memory_of(process)
        except psutil.Error:
            continue
    return _Usage(server, busy, float(times.get("steal", 0.0)), memory)


def _tree(root: int | None) -> list[psutil.Process]:
    try:
        process = psutil.Process(root) if root is not None else None
        return [process, *process.children(recursive=True)] if process is not None else []
    except psutil.NoSuchProcess:
        return []


def _memory_of(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except (psutil.AccessDenied, AttributeError):
        return int(process.memory_info().rss)


def _write(client: "subprocess.Popen[str]", line: str) -> None:
    if client.stdin is None:
        raise LoadClientError("the load client has no pipe")
    client.stdin.write(line + "\n")
    client.stdin.flush()


def _read(client: "subprocess.Popen[str]") -> str:
    line = client.stdout.readline() if client.stdout is not None else ""
    if not line:
        raise LoadClientError("the load client ended without a result; its message is above")
    return line
