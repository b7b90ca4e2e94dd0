"""Joins requests of an event loop to calls of a `Host`, as TorchServe's frontend does for its workers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from torchserve_openvino.adapters.core import Answered, Asked, Host
from torchserve_openvino.errors import ItemError
from torchserve_openvino.serving.requests.isolation import server_fault

logger = logging.getLogger(__name__)

# Most requests that wait for their call, as TorchServe's job queue has it.
QUEUE_SIZE = 100
# Gauge of the requests whose call has not begun.
WAITING = "openvino_waiting_requests"


class Reply:
    """The answer to one request: usually one piece, or as many as the handler streams."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[Answered | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, piece: Answered | None) -> None:
        """Adds a piece, from any thread; None ends the answer."""
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def pieces(self) -> AsyncIterator[Answered]:
        """Yields the pieces as they come; the first has the answer's status and type."""
        while (piece := await self._pieces.get()) is not None:
            yield piece


class Batcher:
    """Collects requests, and has them answered one call after another.

    Args:
        host: Answers them.
    """

    def __init__(self, host: Host, queue_size: int = QUEUE_SIZE) -> None:
        self._host = host
        self._waiting: asyncio.Queue[tuple[Asked, Reply]] = asyncio.Queue(queue_size)
        # A handler takes one call at a time, and always in the same thread.
        self._thread = ThreadPoolExecutor(1, "answers")
        self._tasks: set[asyncio.Task[None]] = set()
        self._collector: asyncio.Task[None] | None = None
        self._show()

    @property
    def waiting(self) -> int:
        """Requests whose call has not begun."""
        return self._waiting.qsize()

    def ask(self, asked: Asked) -> AsyncIterator[Answered]:
        """Has a request answered, and yields the pieces of its answer; a full queue refuses it (503)."""
        reply = Reply()
        if self._host.ended:
            _refuse([reply], f"{self._host.ended}, and is being replaced")
        elif self._host.awaits:
            self._keep(self._alone(asked, reply))
        else:
            if self._collector is None:
                self._collector = asyncio.create_task(self._collect())
            try:
                self._waiting.put_nowait((asked, reply))
                self._show()
            except asyncio.QueueFull:
                _refuse([reply], f"{self._waiting.maxsize} requests are waiting already")
        return reply.pieces()

    def _show(self) -> None:
        self._host.record("gauge", WAITING, self.waiting, {})

    def _keep(self, run: Coroutine[Any, Any, None]) -> None:
        # The loop itself keeps only weak references.
        task = asyncio.create_task(run)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _collect(self) -> None:
        """Takes what waits, call by call."""
        loop = asyncio.get_running_loop()
        held: tuple[Asked, Reply] | None = None
        while True:
            batch = [held or await self._waiting.get()]
            held = None
            until = loop.time() + self._host.delay
            while len(batch) < self._host.batch_size and (one := await self._next(until)):
                if one[0].envelope is not batch[0][0].envelope:
                    held = one
                    break
                batch.append(one)
            self._show()
            await self._answer([asked for asked, _ in batch], [reply for _, reply in batch])

    async def _next(self, until: float) -> tuple[Asked, Reply] | None:
        """Returns what waits already, however late the loop comes to it, or what comes until then."""
        try:
            return self._waiting.get_nowait()
        except asyncio.QueueEmpty:
            wait = until - asyncio.get_running_loop().time()
        try:
            return await asyncio.wait_for(self._waiting.get(), wait)
        except asyncio.TimeoutError:
            return None

    async def _answer(self, asked: Sequence[Asked], replies: Sequence[Reply]) -> None:
        if self._host.ended:
            _refuse(replies, f"{self._host.ended}, and is being replaced")
            return
        call = asyncio.get_running_loop().run_in_executor(
            self._thread, self._host.answer, asked, lambda place, piece: replies[place].put(piece)
        )
        try:
            answers = await asyncio.wait_for(call, self._host.timeout)
        except asyncio.TimeoutError:
            # A thread can't be stopped: the process has to be replaced, as TorchServe replaces its workers.
            self._host.ended = f"a call took longer than responseTimeout ({self._host.timeout:g} s)"
            logger.error("ERROR: %s", self._host.ended)
            _refuse(replies, self._host.ended)
            return
        except Exception as error:
            # Whatever is wrong with this call: those that wait behind it are answered.
            answers = [Answered.refused(server_fault(error))] * len(asked)
        for reply, answer in zip(replies, answers, strict=True):
            reply.put(answer)
            reply.put(None)

    async def _alone(self, asked: Asked, reply: Reply) -> None:
        reply.put(await self._host.answer_alone(asked, lambda _, piece: reply.put(piece)))
        reply.put(None)


def _refuse(replies: Sequence[Reply], why: str) -> None:
    error = ItemError(f"{why}: send the request again later")
    error.status = HTTPStatus.SERVICE_UNAVAILABLE.value
    for reply in replies:
        reply.put(Answered.refused(error))
        reply.put(None)
