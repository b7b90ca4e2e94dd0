"""Joins requests of an event loop to calls of an `ArchiveService`, as TorchServe's frontend does for its workers."""

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from torchserve_openvino.errors import ItemError
from torchserve_openvino.hosts.archive_service import ArchiveService, row_of
from torchserve_openvino.hosts.background import background
from torchserve_openvino.hosts.batch_delay import BatchDelay
from torchserve_openvino.serving.requests.isolation import isolated, server_fault
from torchserve_openvino.serving.requests.messages import (
    HEALTH_HEADER,
    PATH_HEADER,
    Request,
    Response,
    request_id,
    unavailable,
    unhealthy_reason,
)
from torchserve_openvino.tasks.standard.refusal_forms import form_of_path

if TYPE_CHECKING:
    # Needs the web server's library, which other users of this module do without.
    from torchserve_openvino.hosts.http import ForwardedRequest

logger = logging.getLogger(__name__)

# Most requests that wait for their call, as TorchServe's job queue has it.
QUEUE_SIZE = 100
ID_HEADER = "x-request-id"
# Gauge of the requests whose call has not begun.
WAITING = "openvino_waiting_requests"


def _unavailable(reason: str, request: Request) -> Response:
    return unavailable(reason, request.id, form_of_path(request.path, request.envelope))


class Reply:
    """The answer to one request: usually one piece, or as many as the handler streams.

    Args:
        request: The request.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._pieces: asyncio.Queue[Response | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, piece: Response | None) -> None:
        """Adds a piece, from any thread; None ends the answer."""
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def send(self, piece: Response) -> None:
        """Adds a piece in bytes, from any thread."""
        self.put(piece.encoded())

    def end(self, piece: Response) -> None:
        """Adds the last piece, in the loop's thread."""
        self._pieces.put_nowait(piece)
        self._pieces.put_nowait(None)

    def refuse(self, reason: str) -> None:
        """Ends the answer with a refusal (503); in the loop's thread."""
        self.end(_unavailable(reason, self._request))

    async def pieces(self) -> AsyncIterator[Response]:
        """Yields the pieces as they come; the first has the answer's status and type."""
        while (piece := await self._pieces.get()) is not None:
            yield piece


class Batcher:
    """Collects requests, and has them answered one call after another.

    Requests come from one event loop. A thread joins and answers them: a handler takes one call at a time, always in
    the same thread, and a wait for further requests is more exact there than in a loop, whose timers count in
    milliseconds.

    Args:
        service: Answers them.
        queue_size: Most requests that wait for their call.
    """

    def __init__(self, service: ArchiveService, queue_size: int = QUEUE_SIZE) -> None:
        self._service = service
        self._queue_size = queue_size
        self._delay = BatchDelay(service.delay)
        self._waiting: queue.SimpleQueue[tuple[Request, Reply]] = queue.SimpleQueue()
        # Those that no call has answered yet: they wait, run, or are held for the next call. Of the loop's thread.
        self._open: set[Reply] = set()
        # When the present call takes too long, by `time.monotonic`.
        self._until: float | None = None
        self._thread: threading.Thread | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._showing = threading.Lock()
        self._show()

    @property
    def waiting(self) -> int:
        """Requests whose call has not begun."""
        return self._waiting.qsize()

    def submit(self, request: Request) -> AsyncIterator[Response]:
        """Has a request answered, and yields the pieces of its answer; a full queue refuses it (503)."""
        reply = Reply(request)
        request = replace(request, arrived=time.time(), send=reply.send)
        if self._service.ended:
            reply.refuse(f"{self._service.ended}, and is being replaced")
        elif self._service.awaits:
            background(self._alone(request, reply), self._tasks)
        elif self.waiting >= self._queue_size:
            reply.refuse(f"{self._queue_size} requests are waiting already")
        else:
            self._delay.on_request(len(self._open))
            self._open.add(reply)
            self._waiting.put((request, reply))
            self._show()
            self._start(asyncio.get_running_loop())
        return reply.pieces()

    def _show(self) -> None:
        # Two threads show it: the later value is the newer one.
        with self._showing:
            self._service.record("gauge", WAITING, self.waiting, {})

    async def _alone(self, request: Request, reply: Reply) -> None:
        reply.put(await self._service.answer_alone(request))
        reply.put(None)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(loop,), name="answers", daemon=True)
            self._thread.start()
        if self._watch is None:
            self._watch = loop.call_later(self._service.timeout, self._look)

    def _look(self) -> None:
        """Ends this process if a call takes too long; called in the loop."""
        until, now = self._until, time.monotonic()
        self._watch = None
        if until is not None and until <= now:
            # A thread can't be stopped: the process has to be replaced, as TorchServe replaces its workers.
            self._service.ended = f"a call took longer than responseTimeout ({self._service.timeout:g} s)"
            logger.error("ERROR: %s", self._service.ended)
            while self._next(0.0) is not None:
                pass
            self._show()
            for reply in list(self._open):
                self._open.remove(reply)
                reply.refuse(self._service.ended)
        elif self._open:
            left = self._service.timeout if until is None else until - now
            self._watch = asyncio.get_running_loop().call_later(left, self._look)

    def _end(self, replies: Sequence[Reply], answers: Sequence[Response]) -> None:
        """Ends replies, but for those that a call which took too long has left; called in the loop."""
        for reply, answer in zip(replies, answers, strict=True):
            if reply in self._open:
                self._open.remove(reply)
                reply.end(answer)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Takes what waits, call by call."""
        waiting: tuple[Request, Reply] | None = None
        while True:
            batch = [waiting or self._waiting.get()]
            waiting = None
            until = time.monotonic() + self._delay.seconds
            while len(batch) < self._service.batch_size and (one := self._next(until)):
                if one[0].envelope != batch[0][0].envelope:
                    waiting = one
                    break
                batch.append(one)
            self._delay.on_batch(len(batch))
            self._show()
            replies = [reply for _, reply in batch]
            answers = self._answers([request for request, _ in batch])
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(self._end, replies, answers)

    def _next(self, until: float) -> tuple[Request, Reply] | None:
        """Returns what waits already, however late it is, or what comes until then."""
        try:
            return self._waiting.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None

    def _answers(self, requests: Sequence[Request]) -> list[Response]:
        if self._service.ended:
            return [_unavailable(f"{self._service.ended}, and is being replaced", request) for request in requests]
        self._until = time.monotonic() + self._service.timeout
        try:
            return self._service.answer(requests)
        except Exception as error:
            # Whatever is wrong with this call: those that wait behind it are answered.
            fault = server_fault(error)
            return [
                Response.refused(fault, request.id, form_of_path(request.path, request.envelope))
                for request in requests
            ]
        finally:
            self._until = None


async def not_ready(batcher: Batcher) -> str:
    """Returns why the model is not ready; empty if it answers its warm-up sample rightly, and its policy holds."""
    probe = Request({"body": {}}, {HEALTH_HEADER: "1"}, uuid.uuid4().hex)
    (answer,) = [piece async for piece in batcher.submit(probe)]
    return "" if answer.status == HTTPStatus.OK else unhealthy_reason(answer.body)


async def predictions(batcher: Batcher, forwarded: "ForwardedRequest") -> AsyncIterator[Response]:
    """Yields the pieces of the response to a request."""
    name = request_id(forwarded.headers.get(ID_HEADER))
    kind = forwarded.headers.get("content-type", "")
    row = isolated(partial(row_of, forwarded.body, kind, forwarded.parameters))
    if isinstance(row, ItemError):
        yield Response.refused(row, name, form_of_path(forwarded.path))
        return
    # As TorchServe names the endpoint of OpenAI's API to handlers.
    headers = {**forwarded.headers, PATH_HEADER: forwarded.path}
    async for piece in batcher.submit(Request(row, headers, name)):
        yield piece
