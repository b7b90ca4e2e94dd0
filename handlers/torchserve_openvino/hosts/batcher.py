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
    EXPLAIN_HEADER,
    HEALTH_HEADER,
    PATH_HEADER,
    Request,
    Response,
    request_id,
    unavailable_error,
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


# How long a request may go on whose answer nobody waits for any more; then its process has to be replaced.
_GRACE_SECONDS = 10.0


class Reply:
    """The answer to one request: usually one piece, or as many as the handler streams.

    Attributes:
        gone: Whether nobody reads it any more.
        touched: When the last piece came, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.gone, self.touched = False, time.monotonic()
        self._pieces: asyncio.Queue[Response | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, piece: Response | None) -> None:
        """Adds a piece, from any thread; None ends the answer."""
        self.touched = time.monotonic()
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def send(self, piece: Response) -> None:
        """Adds a piece in bytes, from any thread."""
        self.put(piece.encoded())

    def end(self, piece: Response) -> None:
        """Adds the last piece, in the loop's thread."""
        self._pieces.put_nowait(piece)
        self._pieces.put_nowait(None)

    async def pieces(self) -> AsyncIterator[Response]:
        """Yields the pieces as they come; the first has the answer's status and type."""
        try:
            while (piece := await self._pieces.get()) is not None:
                yield piece
        finally:
            self.gone = True


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
        self._open: dict[Reply, Request] = {}
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
        reply = Reply()
        request = replace(request, arrived=time.time(), send=reply.send, is_gone=lambda: reply.gone)
        if self._service.ended:
            reply.end(self._unavailable(f"{self._service.ended}, and is being replaced", request))
        elif self._service.awaits:
            background(self._alone(request, reply), self._tasks)
        elif self.waiting >= self._queue_size:
            reply.end(self._unavailable(f"{self._queue_size} requests are waiting already", request))
        else:
            self._delay.on_request(len(self._open))
            self._open[reply] = request
            self._waiting.put((request, reply))
            self._show()
            self._start(asyncio.get_running_loop())
        return reply.pieces()

    def _show(self) -> None:
        # Two threads show it: the later value is the newer one.
        with self._showing:
            self._service.record("gauge", WAITING, self.waiting, {})

    def refused(self, error: ItemError, request: Request) -> Response:
        """Returns the refusal of a request that the handler does not answer, and counts it; from any thread."""
        return self._service.refused(error, request.id, form_of_path(request.path, request.envelope))

    def _unavailable(self, reason: str, request: Request) -> Response:
        return self.refused(unavailable_error(reason), request)

    async def _alone(self, request: Request, reply: Reply) -> None:
        """Has a request answered beside others; each of its pieces may take `ArchiveService.timeout`."""
        answering = asyncio.ensure_future(self._service.answer_alone(request))
        limit = self._service.timeout
        while not answering.done() and (left := reply.touched + limit - time.monotonic()) > 0:
            await asyncio.wait({answering}, timeout=left)
        if answering.done():
            try:
                reply.end(answering.result())
            except BaseException as error:
                # Such as the panic of a library in Rust, which is no Exception.
                reply.end(self.refused(server_fault(error), request))
            return
        reply.end(self._unavailable(self._too_long, request))
        # Its handler finds out that nobody waits.
        reply.gone = True
        await asyncio.wait({answering}, timeout=_GRACE_SECONDS)
        if not answering.done():
            self._give_up()

    @property
    def _too_long(self) -> str:
        return f"a call took longer than responseTimeout ({self._service.timeout:g} s)"

    def _give_up(self) -> None:
        """Marks this process for replacement: a thread that hangs can't be stopped."""
        self._service.ended = self._too_long
        logger.error("ERROR: %s", self._too_long)

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
            self._give_up()
            while self._next(0.0) is not None:
                pass
            self._show()
            for reply, request in list(self._open.items()):
                del self._open[reply]
                reply.end(self._unavailable(self._service.ended, request))
        elif self._open:
            left = self._service.timeout if until is None else until - now
            self._watch = asyncio.get_running_loop().call_later(left, self._look)

    def _end(self, replies: Sequence[Reply], answers: Sequence[Response]) -> None:
        """Ends replies, but for those that a call which took too long has left; called in the loop."""
        for reply, answer in zip(replies, answers, strict=True):
            if self._open.pop(reply, None) is not None:
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
            return [self._unavailable(f"{self._service.ended}, and is being replaced", one) for one in requests]
        self._until = time.monotonic() + self._service.timeout
        try:
            return self._service.answer(requests)
        except BaseException as error:
            # Whatever is wrong with this call, also the panic of a library in Rust, which is no Exception: those that
            # wait behind it are answered.
            fault = server_fault(error)
            return [self.refused(fault, request) for request in requests]
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
    # As TorchServe names the endpoint of OpenAI's API to handlers. A client asks for no explanation by a header.
    headers = {**forwarded.headers, PATH_HEADER: forwarded.path, EXPLAIN_HEADER: "False"}
    if isinstance(row, ItemError):
        yield batcher.refused(row, Request({}, headers, name))
        return
    async for piece in batcher.submit(Request(row, headers, name)):
        yield piece
