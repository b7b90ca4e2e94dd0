"""`Connection`: a client's connection, with bounds on everything that is read before a request has an endpoint."""

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from itertools import chain
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

# Of the first line and the headers together. TorchServe's frontend allows 8 KiB of headers.
MOST_HEAD_BYTES = 64 << 10
MOST_HEADERS = 200
# Requests of a connection that wait for the response to an earlier one.
MOST_PIPELINED = 16
# Bytes that are read before a head is there, or more of a body, behind whose last chunk trailers come without end. They
# come in pieces of 256 KiB, and the first may have the end of a body.
_MOST_READ_BYTES = 8 * MOST_HEAD_BYTES
# Seconds in which a head has to arrive, from the start of the connection or its first byte on.
HEAD_SECONDS = 30.0
# Seconds in which the rest of a body has to arrive whose request was refused already.
REST_SECONDS = 60.0
# Seconds in which a client that has a lot to read has to read at least so many bytes.
READ_SECONDS = 60.0
LEAST_READ_BYTES = 32 << 10

_UPGRADES = {b"connection", b"upgrade", b"http2-settings"}


class _HeadTooLargeError(ValueError):
    """The head of a request is too large."""


class _TooManyError(ValueError):
    """Too many requests wait for the response to an earlier one."""


class _ClosingTransport:
    """A transport that reports when it is closed, by whatever part of uvicorn: the connection may have unsent bytes.

    Args:
        transport: The transport.
        on_close: Called after it was closed.
    """

    def __init__(self, transport: asyncio.Transport, on_close: Callable[[], None]) -> None:
        self._transport, self._on_close = transport, on_close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._transport.close()
        self._on_close()


class Connection(HttpToolsProtocol):
    """Uvicorn's connection, with limits that it does not have.

    - Sizes and numbers: of a head (431), and of requests that wait behind each other (the connection ends after those
      before).
    - Times: for a head, for the rest of a refused request's body, and for reading a response.
    - ``Upgrade`` is ignored, as HTTP allows: uvicorn's parser would take the body for another protocol's bytes, or for
      the next request. Java's client sends ``Upgrade: h2c`` with each first request.
    - Where there are as many connections as there may be, a new one ends that which has been idle for longest.
    - All requests of a connection end with it, not only the latest.
    - What is no HTTP behind a request ends the connection after that request's response.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: RequestResponseCycle | None = None
        # Whether a head is due or comes, and how much was read since, or since the last piece of a body.
        self._reads_head, self._read_bytes = True, 0
        # The head of a request that asks for another protocol, without that.
        self._plain_head: bytes | None = None
        self._is_refused = False
        # When it began to wait for a request, by the loop's clock.
        self._idle_since = 0.0
        self._deadline: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        # Bytes that the client had to read when that began.
        self._unread = 0

    # --- the connection -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begins to wait for a request."""
        super().connection_made(_ClosingTransport(transport, self._on_close))
        self._idle_since = self.loop.time()
        self._make_room()
        self._set_deadline(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all requests."""
        self._clear_deadline()
        self._end_watch()
        self.resume_writing()
        for cycle in [self._running, *(cycle for cycle, _ in self.pipeline)]:
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Notes that the client does not read."""
        super().pause_writing()
        if self._reading is None:
            self._watch_reading()

    def resume_writing(self) -> None:
        """Notes that the client has read."""
        if not self.transport.is_closing():
            self._end_watch()
        super().resume_writing()

    def _on_close(self) -> None:
        """Watches that the client reads what is not sent yet: the connection stays as long."""
        if self._reading is None and self.transport.get_write_buffer_size():
            self._watch_reading()

    def _end_watch(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _watch_reading(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(READ_SECONDS, self._has_read)

    def _has_read(self) -> None:
        if self._unread - self.transport.get_write_buffer_size() >= LEAST_READ_BYTES:
            self._watch_reading()
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Takes what the client sends."""
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(error)
        else:
            self._read_bytes += len(data)
            if self._read_bytes > _MOST_READ_BYTES or len(self.headers or ()) > MOST_HEADERS:
                self._refuse(_HeadTooLargeError())
            elif self._reads_head and self._deadline is None and not self._is_busy and not self.transport.is_closing():
                # Empty lines are no request.
                self._set_deadline(HEAD_SECONDS)

    # --- the parser's callbacks ---------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header; trailers, which come behind a body, are dropped."""
        if self._reads_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Takes a piece of a body, which the server limits."""
        self._read_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Starts the request."""
        self._reads_head = False
        self._clear_deadline()
        # It runs if the end of the request before came together with this head.
        self._unset_keepalive_if_required()
        size = len(self.url) + sum(map(len, chain.from_iterable(self.headers)))
        if size > MOST_HEAD_BYTES or len(self.headers) > MOST_HEADERS:
            raise _HeadTooLargeError
        if self.parser.should_upgrade():
            self._plain_head = self._head_without_upgrade()
            return
        if len(self.pipeline) >= MOST_PIPELINED:
            raise _TooManyError
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Ends the request's body."""
        self._reads_head, self._read_bytes = True, 0
        if self._plain_head is not None:
            return
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            # The rest of a refused request is there.
            self._clear_deadline()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Goes on with the next request."""
        answered = self._running
        super().on_response_complete()
        self._idle_since = self.loop.time()
        if not self.transport.is_closing() and answered is not None and answered is self.cycle and answered.more_body:
            self._set_deadline(REST_SECONDS)

    # --- limits -------------------------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return self._running is not None and not self._running.response_complete

    @property
    def _is_idle(self) -> bool:
        waits = self._reads_head and not self._is_busy and not self.transport.is_closing()
        # A client may still read the response.
        return waits and not self.transport.get_write_buffer_size()

    def _make_room(self) -> None:
        """Ends the connection that has been idle for longest, if this one is more than there may be."""
        if self.limit_concurrency is None or len(self.connections) < self.limit_concurrency:
            return
        others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
        if idle := [other for other in others if other._is_idle]:
            min(idle, key=lambda other: other._idle_since).transport.abort()

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, self._is_late, seconds)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self, seconds: float) -> None:
        if self._is_busy:
            # An earlier request runs: reading may wait for it.
            self._set_deadline(seconds)
        else:
            self.transport.abort()

    def _refuse(self, error: Exception) -> None:
        """Refuses what comes from now on; earlier requests are answered."""
        self._is_refused = True
        self._clear_deadline()
        cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
        if self.pipeline and self.pipeline[0][0].more_body:
            # Its body will never be whole.
            self.pipeline.popleft()
        newest = self.pipeline[0][0] if self.pipeline else self._running
        if newest is not None and not newest.response_complete and not newest.more_body:
            newest.keep_alive = False
        elif newest is not None and newest.response_started and not newest.response_complete:
            self.transport.close()
        elif isinstance(cause, _HeadTooLargeError):
            limits = f"{MOST_HEAD_BYTES >> 10} KiB and {MOST_HEADERS} headers"
            self._end(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"URL and headers of a request have at most {limits}")
        else:
            self._end(HTTPStatus.BAD_REQUEST, "this is no valid HTTP")

    def _end(self, status: HTTPStatus, message: str) -> None:
        body = json.dumps({"code": int(status), "type": "InvalidHttp", "message": message}).encode()
        head = (
            f"HTTP/1.1 {int(status)} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    # --- Upgrade ------------------------------------------------------------------------------------------------

    def _head_without_upgrade(self) -> bytes:
        """Returns the head of the present request as if it did not ask for another protocol; empty for CONNECT."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            return b""
        kept = [(name, value) for name, value in self.headers if name not in _UPGRADES]
        tokens = {token.strip().lower() for name, value in self.headers if name == b"connection"
                  for token in value.split(b",")}  # fmt: skip
        if others := tokens & {b"close", b"keep-alive"}:
            kept.append((b"connection", b", ".join(sorted(others))))
        first = b"%b %b HTTP/%b\r\n" % (method, self.url, self.parser.get_http_version().encode())
        return first + b"".join(b"%b: %b\r\n" % header for header in kept) + b"\r\n"

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Reads a request that asks for another protocol by a parser that does not know it."""
        head, self._plain_head = self._plain_head, None
        if not head:
            self._refuse(ValueError("CONNECT is not supported"))
            return
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(head)
        if rest:
            self.data_received(rest)
