"""`ServedArchive`: one version of a model, with its queue and its workers."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from torchserve_openvino.errors import ItemError, ModelLoadError, class_and_line
from torchserve_openvino.hosts.batch_delay import BatchDelay
from torchserve_openvino.hosts.model_settings import ModelSettings
from torchserve_openvino.hosts.serve.unpacked_folder import UnpackedFolder
from torchserve_openvino.hosts.serve.worker_process import Pending, RefusedError, WorkerLostError, WorkerProcess
from torchserve_openvino.packaging.archive import extract
from torchserve_openvino.serving.requests.messages import Response

logger = logging.getLogger(__name__)

# Seconds before a worker that ended starts again: doubled each time, up to the most.
_FIRST_PAUSE, _MOST_PAUSE = 0.5, 30.0
# A worker that ran for this long starts again after the first pause.
_STEADY_SECONDS = 60.0
# Kind of a call of `Record` by which gauges with a label are removed.
FORGET = "forget"

Record = Callable[[str, str, float, Mapping[str, str]], None]


class ServedArchive:
    """One archive: requests wait in its queue, and its workers take them, each a batch at a time.

    Args:
        archive: The .mar.
        settings: What it says.
        workers: Worker processes.
        record: Gets metrics.
        on_change: Called with a line of text when the state of a worker changes.

    Attributes:
        archive: The .mar.
        settings: What it says.
        loaded: When its first worker was ready, in seconds since 1970; 0 before.
        used: When the last request came or was answered, by `time.monotonic`.
        memory: Bytes that its workers had when they were last looked at.
        stamp: Date and size of the archive's file when it was read.
    """

    def __init__(
        self,
        archive: Path,
        settings: ModelSettings,
        workers: int,
        record: Record,
        on_change: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.archive, self.settings, self.workers = archive, settings, workers
        self.loaded, self.used, self.memory = 0.0, time.monotonic(), 0
        self.stamp = stamp_of(archive)
        self._record, self._on_change = record, on_change
        self._unpacked = UnpackedFolder()
        self._folder = self._unpacked.path
        self._unpacking: asyncio.Task[None] | None = None
        self._queue: deque[Pending] = deque()
        self._delay = BatchDelay(settings.delay)
        self._open: set[Pending] = set()
        self._waiters: set[asyncio.Future[None]] = set()
        # The worker that collects its batch: requests that come meanwhile are for it.
        self._collector: WorkerProcess | None = None
        self._processes: dict[int, WorkerProcess] = {}
        self._slots: dict[int, asyncio.Task[None]] = {}
        self._timers: dict[Pending, asyncio.TimerHandle] = {}
        self._ending = asyncio.Event()
        self._first_end: asyncio.Future[None] | None = None
        self._refused_because = ""
        self.step = "waiting to start"
        self.restarts = 0
        self._is_stopped = False
        # Why it takes no more requests; empty while it does.
        self._refuses = ""

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """Name and version, for messages."""
        return f"{self.settings.name} {self.settings.version}"

    @property
    def state(self) -> str:
        """``READY``, ``loading``, ``idle``, ``failed`` or ``ended``."""
        if any(process.is_ready for process in self._processes.values()):
            return "READY"
        if self._refused_because:
            return "failed"
        if self._slots and not self._ending.is_set():
            return "loading"
        return "idle" if self.loaded and not self._is_stopped else "ended"

    @property
    def problem(self) -> str:
        """Why no worker can answer; empty while one can, or will for the request that wakes the model."""
        if self.state == "READY" or self.rests_or_wakes:
            return ""
        return self._refused_because or f"it is {self.state}: {self.step}"

    @property
    def rests_or_wakes(self) -> bool:
        """Whether its workers have ended until the next request, or start again for one."""
        return self.state == "idle" or (self.state == "loading" and bool(self.loaded) and not self._has_begun)

    @property
    def _has_begun(self) -> bool:
        """Whether a worker was ready, or was lost, since the workers were started."""
        return self._first_end is None or self._first_end.done()

    @property
    def waiting(self) -> int:
        """Requests whose call has not begun."""
        return len(self._queue)

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._open)

    @property
    def pids(self) -> list[int]:
        """The processes of its workers."""
        processes = list(self._processes.values())
        return [process.pid for process in processes if process.pid is not None and not process.ended.done()]

    def describe(self) -> dict[str, Any]:
        """Returns its description, with the keys of TorchServe's management API."""
        settings, workers = self.settings, []
        for number, process in sorted(self._processes.items()):
            status = "READY" if process.is_ready else "UNLOADING"
            started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(process.started))
            workers.append({
                "id": str(number), "startTime": started, "status": status, "memoryUsage": _resident(process.pid),
                "pid": process.pid or 0, "gpu": False,
            })  # fmt: skip
        return {
            "modelName": settings.name, "modelVersion": settings.version, "modelUrl": self.archive.name,
            "runtime": "python", "status": self.state, "minWorkers": self.workers, "maxWorkers": self.workers,
            "batchSize": settings.batch_size, "maxBatchDelay": round(settings.delay * 1e3),
            "responseTimeout": round(settings.timeout), "startupTimeout": round(settings.startup),
            "loadedAtStartup": True, "workers": workers, "step": self.step if self.state == "loading" else "",
            "jobQueueStatus": {
                "remainingCapacity": max(0, settings.queue_size - self.waiting), "pendingRequests": self.waiting,
            },
        }  # fmt: skip

    async def report(self, seconds: float) -> dict[str, Any] | None:
        """Returns the report of a worker; None if none is ready, or all are busy for so long."""
        ready = [process for process in self._processes.values() if process.is_ready]
        tasks = [asyncio.create_task(process.describe(seconds)) for process in ready]
        try:
            for task in asyncio.as_completed(tasks):
                if (report := await task) is not None:
                    return report
            return None
        finally:
            for late in tasks:
                late.cancel()

    # --- start and end ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Unpacks the archive, starts its workers, and waits until one of them is ready.

        Raises:
            PackagingError: The archive can't be unpacked.
            ModelLoadError: It is refused, or its worker ends.
        """
        try:
            if not self._folder.is_dir():
                self.step = "unpacking"
                self._unpacking = asyncio.create_task(asyncio.to_thread(extract, self.archive, self._folder))
                # A thread can't be canceled: `stop` waits for it.
                await asyncio.shield(self._unpacking)
            await self._start_workers()
        except (WorkerLostError, OSError) as error:
            await self.stop(0)
            raise ModelLoadError(f"{self.archive}: {error}") from error
        except BaseException:
            await self.stop(0)
            raise

    def _start_workers(self) -> asyncio.Future[None]:
        self._ending.clear()
        self._refused_because = ""
        self.used = time.monotonic()
        first = self._first_end = asyncio.get_running_loop().create_future()
        for number in range(self.workers):
            self._slots[number] = asyncio.create_task(self._keep_worker(number))
        return first

    def _first_ends(self, error: Exception | None) -> None:
        if self._first_end is not None and not self._first_end.done():
            if error is None:
                self._first_end.set_result(None)
            else:
                self._first_end.set_exception(error)
                # Where requests started the workers again, they wait for it, and nobody else.
                self._first_end.exception()

    async def stop(self, grace: float | None, reason: str = "the server stops") -> None:
        """Answers what waits and runs, for at most so many seconds; then ends the workers, and refuses the rest.

        Args:
            grace: Seconds; None for as long as each call has its responseTimeout.
            reason: Why the rest is refused.
        """
        self._refuses = reason
        await self._end_workers(grace, reason)
        self._refuse_all(reason)
        self._is_stopped = True
        # Nobody sets its gauges later, if another version has taken over.
        self.show()
        if self._unpacking is not None:
            await asyncio.wait({self._unpacking})
        await asyncio.to_thread(self._unpacked.remove)

    async def rest(self) -> None:
        """Ends the workers until the next request, which starts them again; not if one has come already."""
        if self.is_busy:
            return
        logger.info("%s: idle, its workers end until the next request", self.label)
        self._on_change(f"{self.label} is idle")
        # Without a limit: requests that come now are answered by a worker that has not ended yet.
        await self._end_workers(None)
        if self._queue:
            self._start_workers()

    def kill(self, reason: str) -> None:
        """Ends all workers at once."""
        for process in self._processes.values():
            process.kill(reason)

    async def _end_workers(self, grace: float | None, reason: str = "") -> None:
        self._ending.set()
        self._notify()
        slots = list(self._slots.values())
        if slots:
            _, late = (None, set(slots)) if grace == 0 else await asyncio.wait(slots, timeout=grace)
            if late:
                self.kill(reason)
            await asyncio.wait(slots)
        self._slots.clear()
        self._processes.clear()

    def _refuse_all(self, reason: str) -> None:
        self._queue.clear()
        for pending in list(self._open):
            pending.refuse(reason)

    # --- workers ------------------------------------------------------------------------------------------------

    async def _keep_worker(self, number: int) -> None:
        """Runs one worker, and starts it again when it ends."""
        pause = _FIRST_PAUSE
        while not self._ending.is_set():
            process = self._processes[number] = WorkerProcess(
                self._folder, self.workers, self._loads, self._take_metrics
            )
            ready = 0.0
            try:
                await process.start()
                if not await self._until_ready(process):
                    return
                ready = time.monotonic()
                self._is_ready(number, process)
                await self._feed(process)
                reason = ""
            except Exception as error:
                reason = str(error)
                if not isinstance(error, (WorkerLostError, OSError)):
                    # Nothing may end the slot, which nobody would fill again.
                    logger.exception("%s: worker %d is given up", self.label, number)
                    reason = class_and_line(error)
                process.kill(reason)
                self._was_lost(reason, is_refused=isinstance(error, RefusedError))
            finally:
                await process.stop()
                self._forget(process)
            if self._ending.is_set():
                return
            if ready and time.monotonic() - ready > _STEADY_SECONDS:
                pause = _FIRST_PAUSE
            self.restarts += 1
            self._record("counter", "openvino_worker_restarts_total", 1, self._labels)
            logger.warning("%s: worker %d ended: %s; it starts again in %g s", self.label, number, reason, pause)
            self._on_change(f"{self.label}: worker {number} ended: {reason}")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)
            pause = min(2 * pause, _MOST_PAUSE)

    async def _until_ready(self, process: WorkerProcess) -> bool:
        """Waits until a worker is ready; returns False if the model is to end meanwhile, and nobody waits for it.

        Raises:
            WorkerLostError: See `WorkerProcess.until_ready`.
        """
        loading = asyncio.create_task(process.until_ready(self.settings.startup))
        try:
            while not loading.done():
                if self._ending.is_set() and not self._queue:
                    process.kill("it is not needed any more")
                    return False
                await self._changed({loading})
            await loading
            return True
        finally:
            loading.cancel()

    def _loads(self, step: str) -> None:
        self.step = step

    def _is_ready(self, number: int, process: WorkerProcess) -> None:
        self._refused_because = ""
        self.loaded = self.loaded or time.time()
        self.used = time.monotonic()
        logger.info("%s: worker %d (process %s) is READY", self.label, number, process.pid)
        self._on_change(f"{self.label}: worker {number} is READY")
        self._first_ends(None)

    def _was_lost(self, reason: str, is_refused: bool) -> None:
        if is_refused or not self._has_begun:
            self._first_ends(WorkerLostError(reason))
            if not any(process.is_ready for process in self._processes.values()):
                self._refused_because = f"no worker of {self.label} starts: {reason}"
                self._queue.clear()
                for pending in [pending for pending in self._open if pending in self._timers]:
                    pending.refuse(self._refused_because)

    def _forget(self, process: WorkerProcess) -> None:
        process.is_ready = False
        if self._collector is process:
            self._collector = None
        self._record(FORGET, "worker", 0, {"worker": str(process.pid)})
        self._notify()

    async def _feed(self, process: WorkerProcess) -> None:
        """Passes requests on to a worker, until it ends or is not needed any more.

        Raises:
            WorkerLostError: It ended, or has to be replaced.
        """
        if process.awaits:
            await self._feed_alone(process)
            return
        while batch := await self._next_batch(process):
            await process.call(batch, self.settings.timeout)
        if process.ended.done():
            raise WorkerLostError(process.ended.result())

    async def _feed_alone(self, process: WorkerProcess) -> None:
        """Passes each request on as a call of its own, up to as many as may wait."""
        calls: set[asyncio.Task[None]] = set()
        try:
            while True:
                if process.calls >= self.settings.queue_size:
                    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                elif not (batch := await self._next_batch(process, most=1, watched=calls)):
                    if not any(call.done() for call in calls):
                        break
                else:
                    calls.add(asyncio.create_task(process.call(batch, self.settings.timeout)))
                    # It takes its number before the next request is counted.
                    await asyncio.sleep(0)
                for call in [call for call in calls if call.done()]:
                    calls.remove(call)
                    call.result()
            if calls:
                await asyncio.gather(*calls)
            if process.ended.done():
                raise WorkerLostError(process.ended.result())
        finally:
            # The worker ends; so do its calls, which refuse their requests.
            process.kill("it is replaced") if calls else None
            await asyncio.gather(*calls, return_exceptions=True)

    async def _next_batch(
        self, process: WorkerProcess, most: int | None = None, watched: set[asyncio.Task[None]] | None = None
    ) -> list[Pending]:
        """Waits for requests, and returns a batch of them; an empty one if the worker ended or is not needed.

        Args:
            process: The worker.
            most: Most requests; by default the batch size.
            watched: Calls at whose end this returns, too, with an empty batch.
        """
        watched = watched if watched is not None else set()
        while not self._queue or self._collector not in (None, process):
            if process.ended.done() or self._ending.is_set() or any(future.done() for future in watched):
                return []
            await self._changed({process.ended, *watched})
        if process.ended.done():
            return []
        loop, batch = asyncio.get_running_loop(), [self._taken()]
        self._collector = process
        try:
            until = loop.time() + self._delay.seconds
            while len(batch) < (most or self.settings.batch_size) and not process.ended.done():
                if self._queue:
                    if self._queue[0].group != batch[0].group:
                        break
                    batch.append(self._taken())
                elif (left := until - loop.time()) <= 0 or self._ending.is_set():
                    break
                else:
                    await self._changed({process.ended}, left)
            self._delay.on_batch(len(batch))
        except BaseException:
            self._put_back(batch)
            raise
        finally:
            self._collector = None
            self._notify()
        if process.ended.done():
            self._put_back(batch)
            return []
        return batch

    def _taken(self) -> Pending:
        pending = self._queue.popleft()
        if (timer := self._timers.pop(pending, None)) is not None:
            timer.cancel()
        return pending

    def _put_back(self, batch: Sequence[Pending]) -> None:
        for pending in reversed(batch):
            self._queue.appendleft(pending)
            self._limit(pending)

    async def _changed(self, others: set[Any], seconds: float | None = None) -> None:
        """Waits until something changes: requests come, a worker is not needed, one of the others is done."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait({waiter, *others}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiters.discard(waiter)

    def _notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # --- requests -----------------------------------------------------------------------------------------------

    async def answer(self, pending: Pending) -> AsyncIterator[Response]:
        """Yields the pieces of the response to a request; a full queue refuses it (503)."""
        if self._refuses:
            pending.refuse(self._refuses)
        elif self._refused_because and self.state == "failed":
            pending.refuse(self._refused_because)
        elif self.waiting >= self.settings.queue_size:
            reason = f"{self.settings.queue_size} requests of {self.label} are waiting already (jobQueueSize)"
            pending.refuse(reason)
        else:
            self._admit(pending)
        try:
            async for piece in pending.pieces():
                # Workers count their own. A probe is no request.
                if piece.error is not None and not pending.is_gone and not pending.is_probe:
                    self.count_refusal(piece.error)
                yield piece
        finally:
            try:
                pending.hang_up()
            finally:
                if pending.on_left is not None:
                    pending.on_left()

    def hand_over(self, successor: "ServedArchive") -> None:
        """Lets another version of this archive answer what waits here."""
        for _ in range(len(self._queue)):
            pending = self._taken()
            self._open.discard(pending)
            successor._admit(pending)

    def _admit(self, pending: Pending) -> None:
        self._use(pending)
        self._delay.on_request(len(self._open))
        self._open.add(pending)
        self._queue.append(pending)
        pending.on_gone = lambda: self._drop(pending)
        pending.on_left = lambda: self._leave(pending)
        self._limit(pending)
        if not self._slots and self.loaded and not self._is_stopped:
            self._start_workers()
            logger.info("%s: a request came, its workers start again", self.label)
        self._notify()

    def _limit(self, pending: Pending) -> None:
        left = max(0.0, pending.arrived + self.settings.timeout - time.time())
        self._timers[pending] = asyncio.get_running_loop().call_later(left, self._expire, pending)

    def _expire(self, pending: Pending) -> None:
        """Refuses a request whose call has not begun in time."""
        if pending in self._timers:
            self._drop(pending)
            why = "" if self.state == "READY" else f": {self.problem or self.state}"
            reason = f"no worker of {self.label} was free within responseTimeout ({self.settings.timeout:g} s){why}"
            pending.refuse(reason)

    def _drop(self, pending: Pending) -> None:
        """Takes a request out of the queue, of which nobody needs the response any more."""
        if (timer := self._timers.pop(pending, None)) is not None:
            timer.cancel()
        with contextlib.suppress(ValueError):
            self._queue.remove(pending)
            pending.refuse("the client hung up") if pending.is_gone else None
            # A worker that loads may wait for it alone.
            self._notify()

    def _leave(self, pending: Pending) -> None:
        self._drop(pending)
        self._open.discard(pending)
        self._use(pending)

    def _use(self, pending: Pending) -> None:
        # A probe must not keep a model that nobody uses.
        if not pending.is_probe:
            self.used = time.monotonic()

    # --- metrics ------------------------------------------------------------------------------------------------

    @property
    def _labels(self) -> dict[str, str]:
        return {"model_name": self.settings.name, "model_version": self.settings.version}

    def _take_metrics(self, metrics: Sequence[Any]) -> None:
        for kind, name, value, labels in metrics:
            # All values of a histogram, one of anything else.
            for item in value if kind == "histogram" else (value,):
                self._record(kind, name, item, {**labels, **self._labels})

    def count_refusal(self, error: ItemError) -> None:
        """Counts a request that no worker has refused."""
        count_refusal(self._record, error, **self._labels)

    def show(self) -> None:
        """Sets its gauges, which are read from time to time, while they change with each request."""
        self._record("gauge", "openvino_waiting_requests", self.waiting, self._labels)
        ready = sum(process.is_ready for process in self._processes.values())
        self._record("gauge", "openvino_ready_workers", ready, self._labels)

    def measure(self) -> int:
        """Returns the bytes of memory that its workers have now, those of their children included."""
        if pids := self.pids:
            self.memory = sum(map(_resident_tree, pids))
        return self.memory if pids else 0


def count_refusal(record: Record, error: ItemError, model_name: str = "", model_version: str = "") -> None:
    """Counts a refusal by the front process.

    Args:
        record: Gets metrics.
        error: Why the request is refused.
        model_name: The model's name; empty if the request names none that is served.
        model_version: Its version.
    """
    labels = {"code": str(error.status), "model_name": model_name, "model_version": model_version}
    record("counter", "openvino_refused_items_total", 1, labels)


def stamp_of(archive: Path) -> tuple[int, int]:
    """Returns date and size of a file; zeros if it is missing."""
    try:
        status = archive.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _resident(pid: int | None) -> int:
    # Where no file can be opened, psutil raises the system's error.
    try:
        return int(psutil.Process(pid).memory_info().rss) if pid is not None else 0
    except (psutil.Error, OSError):
        return 0


def _resident_tree(pid: int) -> int:
    try:
        children = psutil.Process(pid).children(recursive=True)
    except (psutil.Error, OSError):
        return 0
    return _resident(pid) + sum(_resident(child.pid) for child in children)
