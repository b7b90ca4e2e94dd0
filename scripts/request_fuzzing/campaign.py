"""Sends valid requests beside hostile ones, and judges every answer."""

from __future__ import annotations

import json
import math
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from request_fuzzing.hosts import Server
from request_fuzzing.payloads import Payload
from request_fuzzing.subjects import SUBJECTS, Subject

# Of the requests that are sent at the same time, which the server joins to one batch; the others are valid.
_HOSTILE, _VALID = 3, 1
# Server errors that docs/batching.md and docs/tasks.md name for a single request: no explanations, no memory.
_NAMED = frozenset({501, 507})
# What TorchServe's frontend answers, with 500, to a body that is no form though its type says so; no worker sees it.
_FRONTENDS_OWN = b'"type": "ErrorDataDecoderException"'
_SETTLE_SECONDS = 20.0
_SHARE, _MB = 1.05, 2**20
# Rounds before memory counts, and their share: caches of kernels for each length fill, and the allocator keeps some.
_FIRST_ROUNDS, _FIRST_SHARE = 12, 0.1
_TOLERANCE = 2e-3


@dataclass
class Failure:
    """An answer, or a process, that is not as it must be.

    Attributes:
        task: The subject.
        number: The number of the hostile request, or of the first one of its round.
        kind: Kind of the failure.
        detail: What happened.
        requests: What was sent.
    """

    task: str
    number: int
    kind: str
    detail: str
    requests: list[str]


@dataclass
class Campaign:
    """A run of the fuzzer.

    Attributes:
        seed: Request n of a seed is the same everywhere.
        host: The server's name, for reports.
        start: Starts a server for an archive, as those of `HOSTS` do.
        limit: Seconds for one request.
        peak: Megabytes that a round may take above the memory before it.
        seconds: Time after which no round is started; 0 means no limit.
        console: Where to report.
    """

    seed: int
    host: str
    start: Callable[[Path], AbstractContextManager[Server]]
    limit: float
    peak: float
    seconds: float
    console: Console
    failures: list[Failure] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    slowest: float = 0.0
    largest: float = 0.0
    _end: float = math.inf

    def run(self, tasks: Sequence[str], first: int, count: int) -> None:
        """Sends ``count`` hostile requests, evenly divided among tasks."""
        if self.seconds:
            self._end = time.monotonic() + self.seconds
        columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=self.console) as progress:
            for position, name in enumerate(tasks):
                share = count // len(tasks) + (position < count % len(tasks))
                if not share:
                    continue
                bar = progress.add_task(name, total=share)
                for done in self.fuzz(SUBJECTS[name](), first, share):
                    progress.update(bar, completed=done)
                if time.monotonic() > self._end:
                    return

    def fuzz(self, subject: Subject, first: int, count: int) -> Iterator[int]:
        """Fuzzes one task on a server of its own; yields the number of hostile requests so far."""
        with tempfile.TemporaryDirectory(prefix="tsov-") as folder:
            archive = subject.pack(Path(folder))
            with self.start(archive) as server, ThreadPoolExecutor(_HOSTILE + _VALID) as clients:
                yield from _Run(self, subject, server, clients).rounds(first, count)

    def add(self, failure: Failure) -> None:
        """Records a failure, and shows it."""
        self.failures.append(failure)
        self.console.print(f"[red]{failure.task} {failure.number}: {failure.kind}[/red]: ", end="")
        self.console.print(failure.detail, markup=False, highlight=False, soft_wrap=True)
        for request in failure.requests:
            self.console.print(f"    {request}", markup=False, highlight=False, soft_wrap=True)

    def to_dict(self) -> dict[str, Any]:
        """Returns the outcome, JSON-safe."""
        return {
            "seed": self.seed, "host": self.host, "requests": self.requests, "statuses": dict(self.statuses),
            "slowest_seconds": round(self.slowest, 2), "largest_peak_mb": round(self.largest),
            "failures": [asdict(failure) for failure in self.failures],
        }  # fmt: skip


@dataclass
class _Answer:
    payload: Payload
    seconds: float
    response: httpx.Response | None
    error: str = ""

    @property
    def label(self) -> str:
        return f"{self.payload.label} ({len(self.payload.body)} bytes, {self.payload.path or 'plain'})"

    def __str__(self) -> str:
        status = self.response.status_code if self.response is not None else self.error
        text = self.response.text[:300] if self.response is not None else ""
        return f"{status} in {self.seconds:.1f} s to {self.label}: {text}"


class _Run:
    """The requests to one server."""

    def __init__(self, campaign: Campaign, subject: Subject, server: Server, clients: ThreadPoolExecutor) -> None:
        self._campaign, self._subject, self._server, self._clients = campaign, subject, server, clients
        self._valid = [payload for payload in subject.valid if server.takes(payload)]
        self._expected: list[Any] = []

    def rounds(self, first: int, count: int) -> Iterator[int]:
        for payload in self._valid:
            answer = self._send(payload)
            if answer.response is None or answer.response.status_code != httpx.codes.OK:
                raise RuntimeError(f"a valid request is not answered: {answer}\n{self._server.log_tail()}")
            self._expected.append(_content(answer.response))
        worker, done, base = self._server.worker().pid, 0, 0
        while done < count and time.monotonic() < self._campaign._end:
            size = min(_HOSTILE, count - done)
            self._round(first + done, size)
            done += size
            yield done
            if (pid := self._server.worker().pid) != worker:
                self._fail(first + done, "death", f"the worker died\n{self._server.log_tail()[-3000:]}", [])
                worker, base = pid, 0
            if done >= max(_FIRST_ROUNDS * _HOSTILE, _FIRST_SHARE * count) and not base:
                base = self._settled(math.inf)
        if base and (last := self._settled(base * _SHARE)) > base * _SHARE:
            detail = f"{last // _MB} MB after all requests, {base // _MB} MB after the first tenth"
            self._fail(first, "memory", detail, [])

    def _round(self, number: int, size: int) -> None:
        hostile = []
        for position in range(number, number + size):
            rng = random.Random(f"{self._campaign.seed}:{self._subject.name}:{position}")
            payload = self._subject.hostile(rng)
            while not self._server.takes(payload):
                payload = self._subject.hostile(rng)
            hostile.append(payload)
        places = [(number + n) % len(self._valid) for n in range(_VALID)]
        before = self._server.rss()
        with _peak(self._server) as peak:
            futures = [self._clients.submit(self._send, body) for body in hostile]
            neighbors = [self._clients.submit(self._send, self._valid[index]) for index in places]
            answers, valid = [future.result() for future in futures], [neighbor.result() for neighbor in neighbors]
        all_of_them = [*map(str, answers), *map(str, valid)]
        for position, answer in enumerate(answers):
            self._judge(number + position, answer)
        for index, answer in zip(places, valid, strict=True):
            if fault := self._differs(answer, self._expected[index]):
                self._fail(number, "neighbor", fault, all_of_them)
        taken = (peak[0] - before) / _MB
        self._campaign.largest = max(self._campaign.largest, taken)
        if taken > self._campaign.peak:
            self._fail(number, "peak", f"{taken:.0f} MB more memory for a moment", all_of_them)

    def _send(self, payload: Payload) -> _Answer:
        start = time.monotonic()
        try:
            response = self._server.post(payload)
        except httpx.HTTPError as error:
            return _Answer(payload, time.monotonic() - start, None, f"{type(error).__name__}: {error}")
        return _Answer(payload, time.monotonic() - start, response)

    def _judge(self, number: int, answer: _Answer) -> None:
        campaign, response = self._campaign, answer.response
        campaign.requests += 1
        campaign.slowest = max(campaign.slowest, answer.seconds)
        campaign.statuses[str(response.status_code) if response is not None else "none"] += 1
        if response is None:
            self._fail(number, "no answer", answer.error, [str(answer)])
        elif _is_unnamed(response):
            self._fail(number, "status", str(response.status_code), [str(answer)])
        elif (fault := _invalid(response)) is not None:
            self._fail(number, "body", fault, [str(answer)])
        if answer.seconds > campaign.limit:
            self._fail(number, "time", f"{answer.seconds:.1f} s", [str(answer)])

    def _differs(self, answer: _Answer, expected: Any) -> str | None:
        """Returns how a valid request's answer differs from that of the quiet run."""
        if answer.response is None:
            return answer.error
        if answer.response.status_code != httpx.codes.OK:
            return f"{answer.response.status_code} to a valid request"
        if answer.seconds > self._campaign.limit:
            return f"a valid request took {answer.seconds:.1f} s"
        return None if _same(_content(answer.response), expected) else "another answer to a valid request"

    def _settled(self, most: float) -> int:
        """Returns the worker's memory once it is at most ``most``, or does not sink any more."""
        end, lowest = time.monotonic() + _SETTLE_SECONDS, self._server.rss()
        while lowest > most and time.monotonic() < end:
            time.sleep(0.5)
            # Some allocators give memory back at the next call only.
            self._send(self._valid[0])
            lowest = min(lowest, self._server.rss())
        return lowest

    def _fail(self, number: int, kind: str, detail: str, requests: list[str]) -> None:
        self._campaign.add(Failure(self._subject.name, number, kind, detail, requests))


def _content(response: httpx.Response) -> Any:
    """Returns the answer as data, without what changes from call to call."""
    if response.content[:1] in {b"{", b"["}:
        value = json.loads(response.content)
        return (
            {name: item for name, item in value.items() if name not in {"id", "created"}}
            if isinstance(value, dict)
            else value
        )
    return response.content


def _same(value: Any, expected: Any) -> bool:
    """Whether answers are equal, numbers within the rounding of another batch."""
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(_same(value[k], expected[k]) for k in expected)
        )
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(expected, float):
        return isinstance(value, (int, float)) and math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(value == expected)


def _invalid(response: httpx.Response) -> str | None:
    """Returns what is wrong with the body of an answer, which is valid JSON wherever it is no file."""
    body = response.content
    if response.headers.get("content-type", "").startswith(("image/", "application/octet-stream")) or body[:1] not in {
        b"{",
        b"[",
    }:
        return None
    try:
        json.loads(body, parse_constant=_refuse)
    except ValueError as error:
        return f"the answer is not valid JSON: {error}"
    return None


def _is_unnamed(response: httpx.Response) -> bool:
    """Whether an answer is a server error that the docs do not name."""
    if response.status_code < httpx.codes.INTERNAL_SERVER_ERROR or response.status_code in _NAMED:
        return False
    return _FRONTENDS_OWN not in response.content


def _refuse(token: str) -> None:
    raise ValueError(f"it holds {token}")


@contextmanager
def _peak(server: Server) -> Iterator[list[int]]:
    """Yields a list with the largest memory of the worker while the block runs."""
    peak, stop = [server.rss()], threading.Event()

    def look() -> None:
        worker = server.worker()
        while not stop.wait(0.02):
            try:
                peak[0] = max(peak[0], sum(process.memory_info().rss for process in (worker, *worker.children())))
            except psutil.Error:
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
