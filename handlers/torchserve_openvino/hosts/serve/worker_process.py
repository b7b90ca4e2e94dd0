"""`WorkerProcess`: the front process's side of one worker."""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchserve_openvino.hosts.serve.frames import Frame, packed, read_frame
from torchserve_openvino.serving.requests.messages import (
    HEALTH_HEADER,
    PATH_HEADER,
    EnvelopeKind,
    Response,
    unavailable,
)
from torchserve_openvino.tasks.standard.refusal_forms import form_of_path

# --- `Pending`: a request in the front process, from its arrival to the last piece of its response ----------------


@dataclass(eq=False, repr=False)
class Pending:
    """A request, and the response as it comes. It belongs to the event loop's thread.

    Attributes:
        body: The body, as it came.
        content_type: Its type.
        parameters: Those of the URL.
        headers: Headers by name, in lower case.
        id: The request's id.
        envelope: The protocol of the body; None for the handler's own.
        arrived: When it came, in seconds since 1970.
        is_gone: Whether the client has hung up.
        is_answered: Whether its last piece was added.
        on_gone: Called when the client hangs up.
        on_left: Called when its response was sent, or nobody waits for it any more.
    """

    body: bytes
    content_type: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    id: str = ""
    envelope: EnvelopeKind | None = None
    arrived: float = 0.0
    is_gone: bool = False
    is_answered: bool = False
    on_gone: Callable[[], None] | None = None
    on_left: Callable[[], None] | None = None
    _pieces: deque[Response] = field(default_factory=deque)
    _reader: asyncio.Future[None] | None = None

    @property
    def is_probe(self) -> bool:
        """Whether it asks for a worker's health."""
        return HEALTH_HEADER in self.headers

    @property
    def group(self) -> tuple[EnvelopeKind | None, bool]:
        """Requests of one group may share a call: of one protocol, and not of a probe with others."""
        return self.envelope, self.is_probe

    def head(self) -> dict[str, Any]:
        """Returns what a worker gets of it, besides the body."""
        return {
            "bytes": len(self.body), "type": self.content_type, "parameters": dict(self.parameters),
            "headers": dict(self.headers), "id": self.id, "envelope": self.envelope, "arrived": self.arrived,
        }  # fmt: skip

    def add(self, piece: Response, last: bool) -> None:
        """Adds a piece of the response; nothing once the last one was added."""
        if self.is_answered:
            return
        self._pieces.append(piece)
        self.is_answered = last
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def refuse(self, reason: str) -> None:
        """Adds a refusal (503) as the last piece, in the form that the client reads."""
        form = form_of_path(self.headers.get(PATH_HEADER, ""), self.envelope)
        self.add(unavailable(reason, self.id, form), last=True)

    def hang_up(self) -> None:
        """Marks that nobody waits for the response any more."""
        if not self.is_gone and not self.is_answered:
            self.is_gone = True
            if self.on_gone is not None:
                self.on_gone()

    async def pieces(self) -> AsyncIterator[Response]:
        """Yields the pieces as they come; the first has the status and type of the response."""
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if self.is_answered:
                return
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader


# --- `WorkerProcess`: the front process's side of one worker ------------------------------------------------------


logger = logging.getLogger(__name__)

_MODULE = "torchserve_openvino.hosts.serve.worker"
# Seconds in which a worker ends once it is not needed; it has no request then.
_END_SECONDS = 5.0
# Seconds for the last messages of a worker that has ended.
_LAST_SECONDS = 1.0
# Seconds in which a worker ends the generation of a request that nobody waits for.
_CANCEL_SECONDS = 10.0


class WorkerLostError(Exception):
    """A worker ended, or does not answer; the message says how."""


class RefusedError(WorkerLostError):
    """A worker refused its model; the message says why."""


@dataclass
class _OpenCall:
    batch: Sequence[Pending]
    done: asyncio.Future[str]
    # When something of the response came last, by `time.monotonic`.
    seen: float = field(default_factory=time.monotonic)


class WorkerProcess:
    """A process that loads one archive, and answers requests.

    Args:
        folder: The unpacked archive.
        workers: Workers of the model.
        on_step: Gets the step of the load, in words.
        on_metrics: Gets metrics: kind, name, value and labels of each.

    Attributes:
        awaits: Whether each request is a call of its own; known once it is ready.
        is_ready: Whether it answers.
        started: When it was started, in seconds since 1970.
        ended: Done once the process is gone, with how it ended.
        calls: Calls that run.
    """

    def __init__(
        self,
        folder: Path,
        workers: int,
        on_step: Callable[[str], None] = lambda _: None,
        on_metrics: Callable[[Sequence[Any]], None] = lambda _: None,
    ) -> None:
        self._folder, self._workers = folder, workers
        self._on_step, self._on_metrics = on_step, on_metrics
        self.awaits = self.is_ready = False
        self.started = time.time()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        # Nothing is written to it, but it owns the connection from which messages are read.
        self._answers: asyncio.StreamWriter | None = None
        self._numbers = itertools.count(1)
        self._calls: dict[int, _OpenCall] = {}
        self._report: asyncio.Future[dict[str, Any]] | None = None
        self._running: asyncio.Task[None] | None = None
        # Why this side ended it; empty if it ended by itself.
        self._reason = ""

    @property
    def pid(self) -> int | None:
        """The process; None before it was started."""
        return self._process.pid if self._process is not None else None

    @property
    def calls(self) -> int:
        """Calls that run."""
        return len(self._calls)

    async def start(self) -> None:
        """Starts the process.

        Raises:
            OSError: The system does not start it.
        """
        commands, worker_commands = socket.socketpair()
        answers, worker_answers = socket.socketpair()
        with worker_commands, worker_answers:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", _MODULE, str(self._folder), str(self._workers), str(worker_answers.fileno()),
                stdin=worker_commands.fileno(), stdout=subprocess.DEVNULL,
                pass_fds=[worker_answers.fileno()], cwd=self._folder, env=_environment(), start_new_session=True,
            )  # fmt: skip
        if self._reason:
            # Killed while it was started.
            self._kill(self._process)
        reader, self._answers = await asyncio.open_connection(sock=answers)
        _, self._writer = await asyncio.open_connection(sock=commands)
        self._running = asyncio.create_task(self._run(reader))

    async def until_ready(self, seconds: float) -> None:
        """Waits until the archive is loaded.

        Raises:
            RefusedError: The archive is refused.
            WorkerLostError: The process ended, or takes longer than this.
        """
        ends: set[asyncio.Future[Any]] = {self._loaded, self.ended}
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._loaded.done():
            self._loaded.result()
        elif self.ended.done():
            raise WorkerLostError(self.ended.result())
        else:
            raise WorkerLostError(f"it takes longer than startupTimeout ({seconds:g} s) to load")

    async def call(self, batch: Sequence[Pending], timeout: float) -> None:
        """Has requests answered; each has its last piece when this returns.

        Args:
            batch: The requests; one, if the worker `awaits`.
            timeout: Seconds without anything of the response after which the worker counts as hung.

        Raises:
            WorkerLostError: The worker ended, hangs, or has to be replaced.
        """
        number = next(self._numbers)
        call = self._calls[number] = _OpenCall(batch, asyncio.get_running_loop().create_future())
        for index, pending in enumerate(batch):
            pending.on_gone = lambda index=index: self._send({"kind": "gone", "call": number, "index": index})
        try:
            self._send({"kind": "call", "requests": [request.head() for request in batch]}, number, batch)
            for index, pending in enumerate(batch):
                if pending.is_gone:
                    self._send({"kind": "gone", "call": number, "index": index})
            reason = await self._finished(number, call, timeout)
        finally:
            del self._calls[number]
            for pending in batch:
                pending.on_gone = None
                if not pending.is_answered:
                    pending.refuse("its call was given up")
        if reason:
            raise WorkerLostError(reason)

    async def _finished(self, number: int, call: _OpenCall, timeout: float) -> str:
        """Waits for the end of a call; returns why the worker has to be replaced, or an empty text."""
        reason, limit, is_canceled = "", timeout, False
        while not call.done.done():
            left = call.seen + limit - time.monotonic()
            await asyncio.wait({call.done, self.ended}, timeout=max(0, left), return_when=asyncio.FIRST_COMPLETED)
            if call.done.done():
                break
            if self.ended.done():
                reason = f"its worker ended ({self.ended.result()})"
            elif call.seen + limit > time.monotonic():
                continue
            else:
                reason = f"a call took longer than responseTimeout ({timeout:g} s)"
            for pending in call.batch:
                pending.refuse(reason)
            if self.awaits and not self.ended.done() and not is_canceled:
                # Other requests run in the same engine: the worker gets time to end this one alone.
                self._send({"kind": "gone", "call": number, "index": 0})
                call.seen, limit, is_canceled = time.monotonic(), _CANCEL_SECONDS, True
                continue
            return reason
        return call.done.result()

    def _send(self, head: dict[str, Any], number: int | None = None, batch: Sequence[Pending] = ()) -> None:
        if self._writer is None or self.ended.done():
            return
        more = {} if number is None else {"call": number}
        message = packed({**head, **more}, b"".join(request.body for request in batch))
        try:
            self._writer.write(message)
        except (RuntimeError, OSError) as error:
            # Where asyncio writes to nobody, uvloop raises. `ended` will be how the process ended.
            logger.warning("worker %s takes no messages: %s", self.pid, error)
            self.kill("")

    async def describe(self, seconds: float) -> dict[str, Any] | None:
        """Returns the worker's report; None if it does not come in time, as while a call runs."""
        if self._report is None or self._report.done():
            # One at a time: whoever asks while it is made, as during a long call, gets the same.
            self._report = asyncio.get_running_loop().create_future()
            self._send({"kind": "describe"})
        report = self._report
        ends: set[asyncio.Future[Any]] = {report, self.ended}
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return report.result() if report.done() else None

    async def _run(self, reader: asyncio.StreamReader) -> None:
        """Takes messages until the process is gone."""
        assert self._process is not None
        reading, ending = asyncio.create_task(self._read(reader)), asyncio.create_task(self._process.wait())
        await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
        # What it has written comes first. A process that it forked may keep the connection open.
        await asyncio.wait({reading, ending}, timeout=_END_SECONDS if reading.done() else _LAST_SECONDS)
        if not ending.done():
            self.kill("")
        code = await ending
        reading.cancel()
        await asyncio.wait({reading})
        self.is_ready = False
        if not self.ended.done():
            self.ended.set_result(self._reason or _how_it_ended(code))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (frame := await read_frame(reader)) is not None:
                self._take(frame)
        except Exception:
            logger.exception("worker %s sent what is no message", self.pid)
            self.kill("it sent what is no message")

    def _take(self, frame: Frame) -> None:
        head, body = frame
        kind = head["kind"]
        if kind == "piece":
            if (call := self._calls.get(head["call"])) is not None:
                call.seen = time.monotonic()
                piece = Response(body, head["type"], head["status"], headers=head["headers"])
                call.batch[head["index"]].add(piece, last=False)
        elif kind == "done":
            if (call := self._calls.get(head["call"])) is not None and not call.done.done():
                start = 0
                for answer in head["answers"]:
                    end = start + answer["bytes"]
                    piece = Response(body[start:end], answer["type"], answer["status"], headers=answer["headers"])
                    call.batch[answer["index"]].add(piece, last=True)
                    start = end
                call.done.set_result(head["ended"])
            if "metrics" in head:
                self._on_metrics(head["metrics"])
        elif kind == "metrics":
            self._on_metrics(head["metrics"])
        elif kind == "report":
            if self._report is not None and not self._report.done():
                self._report.set_result(head["report"])
        elif kind == "step":
            self._on_step(head["text"])
        elif kind == "ready":
            self.awaits, self.is_ready = head["awaits"], True
            self._loaded.set_result(None)
        elif kind == "refused":
            self._loaded.set_exception(RefusedError(head["reason"]))
            # It may be that nobody waits any more.
            self._loaded.exception()

    def kill(self, reason: str) -> None:
        """Ends the process at once.

        Args:
            reason: Why; empty if how it ends says that.
        """
        self._reason = self._reason or reason
        if self._process is not None and self._process.returncode is None:
            self._kill(self._process)

    @staticmethod
    def _kill(process: asyncio.subprocess.Process) -> None:
        """Ends a process and its children: an engine in one of its own may hang, and would stay."""
        with contextlib.suppress(ProcessLookupError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()

    async def stop(self) -> None:
        """Ends the process, after what it is doing now; at once if that takes long."""
        self.is_ready = False
        if self._process is None:
            return
        if self._writer is not None:
            self._writer.close()
        try:
            await asyncio.wait_for(asyncio.shield(self._process.wait()), _END_SECONDS)
        except asyncio.TimeoutError:
            self.kill("it did not end by itself")
        if self._running is not None:
            await self._running
        if self._answers is not None:
            self._answers.close()


def _environment() -> dict[str, str]:
    """Returns a worker's environment: it runs in the folder of its archive, whose files must not hide modules."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    if path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(
            str(Path(folder).absolute()) for folder in path.split(os.pathsep) if folder
        )
    return environment


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
