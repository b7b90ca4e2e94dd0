"""Connections to `serve`: what is read before a request has an endpoint is bounded in size, number and time."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("httptools", reason="needs the extra serve")

from uvicorn.server import ServerState  # noqa: E402

from torchserve_openvino.hosts.serve import connections  # noqa: E402

# What a short limit of time is here, and how long a slow request takes. A machine may stop for a while at any time.
SHORT, SLOW = 0.4, 2.0


class Server:
    """A server whose application answers with the body, or late, or without reading it."""

    def __init__(self, most: int) -> None:
        self.hung_up, self.answered = 0, 0
        config = uvicorn.Config(
            self._app, interface="asgi3", http=connections.Connection, ws="none", lifespan="off",
            log_level="critical", access_log=False, limit_concurrency=most,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        asyncio.run(self._server.serve([self._listener]))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", scope["path"] != "/unread"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.hung_up += 1
                return
            body, more = body + message["body"], message["more_body"]
        if scope["path"] == "/slow":
            with contextlib.suppress(asyncio.TimeoutError):
                assert (await asyncio.wait_for(receive(), SLOW))["type"] == "http.disconnect"
                self.hung_up += 1
                return
        size = 32 << 20 if scope["path"] == "/large" else len(body)
        head = [(b"content-length", b"%d" % size), (b"x-method", scope["method"].encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        if scope["path"] == "/large":
            for _ in range(32):
                await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        await send({"type": "http.response.body", "body": body if size == len(body) else b""})
        self.answered += 1


@contextlib.contextmanager
def serving(most: int = 1000) -> Iterator[Server]:
    running = Server(most)
    running.start()
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_SECONDS", "REST_SECONDS", "READ_SECONDS"):
        monkeypatch.setattr(connections, name, SHORT)


def connect(server: Server, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    client.sendall(sent)
    return client


def until_end(client: socket.socket) -> bytes:
    """Reads until the server closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(1 << 16):
            received += piece
    return received


def request(path: str = "/", body: bytes = b"", head: bytes = b"") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST %b HTTP/1.1\r\nHost: x\r\n%b%b\r\n%b" % (path.encode(), head, length, body)


CLOSE = b"Connection: close\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"".join(b"h%d: 1\r\n" % number for number in range(300)),
        b"A: " + b"\xff" * (100 << 10) + b"\r\n",
        b"".join(b"h%d: %b\r\n" % (number, b"v" * 4000) for number in range(30)),
    ],
    ids=["many", "long", "together"],
)
def test_a_head_that_is_too_large_is_refused(server: Server, head: bytes) -> None:
    answer = until_end(connect(server, request(head=head)))
    assert answer.startswith(b"HTTP/1.1 431 ") and b"64 KiB and 200 headers" in answer
    assert server.answered == 0


def test_a_url_that_is_too_long_is_refused(server: Server) -> None:
    assert b" 431 " in until_end(connect(server, request("/" + "u" * (100 << 10))))


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nA: "], ids=["url", "header"])
def test_a_head_without_an_end_is_refused(server: Server, start: bytes) -> None:
    client = connect(server, start)
    with contextlib.suppress(ConnectionError):
        for _ in range(1000):
            client.sendall(b"a" * 10_000)
            time.sleep(0.001)
        pytest.fail("10 MB of a head were read")


def test_a_large_body_is_no_head(server: Server) -> None:
    body = bytes(300_000)
    assert until_end(connect(server, request(body=body, head=CLOSE))).endswith(body)


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_another_protocol_is_not_spoken_and_the_body_is_read(server: Server, protocol: bytes, apart: bool) -> None:
    # Java's client: Connection: Upgrade, HTTP2-Settings; Upgrade: h2c.
    inner = request("/smuggled", b"!")
    head = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n" % protocol
    )
    whole = request("/", inner, head)
    client = connect(server, whole[: -len(inner)] if apart else whole)
    if apart:
        time.sleep(0.1)
        client.sendall(inner)
    client.sendall(request("/", b"last", CLOSE))
    answer = until_end(client)
    assert answer.count(b"HTTP/1.1 200") == 2 and inner in answer and answer.endswith(b"last")


def test_a_tunnel_is_refused(server: Server) -> None:
    assert b" 400 " in until_end(connect(server, b"CONNECT host:80 HTTP/1.1\r\nHost: host\r\n\r\n"))


def test_requests_behind_each_other_are_limited(server: Server) -> None:
    answer = until_end(connect(server, request("/", b"a") * 1000))
    assert answer.count(b"HTTP/1.1 200") == 1 + connections.MOST_PIPELINED
    assert b" 400 " not in answer


def test_what_is_no_http_does_not_take_the_place_of_a_response(server: Server) -> None:
    client = connect(server, request("/slow", b"first"))
    time.sleep(0.1)
    client.sendall(b"\x00garbage\r\n\r\n")
    assert until_end(client).endswith(b"first")
    assert b" 400 " in until_end(connect(server, b"\x00garbage\r\n\r\n"))


def test_a_body_that_breaks_off_ends_its_own_request_only(server: Server) -> None:
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    answer = until_end(connect(server, request("/slow", b"first") + chunked))
    assert answer.count(b"HTTP/1.1 ") == 1 and answer.endswith(b"first")


@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\nX", b"\r\n"], ids=["nothing", "half", "empty line"])
def test_a_head_has_to_arrive_in_time(server: Server, short: None, start: bytes) -> None:
    client, begin = connect(server, start), time.monotonic()
    assert until_end(client) == b"" and time.monotonic() - begin < 5


def test_a_byte_now_and_then_does_not_keep_a_connection(server: Server, short: None) -> None:
    client = connect(server, request("/", b"a"))
    with pytest.raises(ConnectionError):
        for _ in range(50):
            client.sendall(b"\r\n")
            time.sleep(SHORT / 4)


def test_a_head_may_wait_behind_a_long_request(server: Server, short: None) -> None:
    half = b"POST / HTTP/1.1\r\nHo"
    client = connect(server, request("/slow", b"first") + half)
    answer = until_end(client)
    assert answer.endswith(b"first")


def test_the_rest_of_a_refused_body_has_to_arrive_in_time(server: Server, short: None) -> None:
    client = connect(server, b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
    with pytest.raises(ConnectionError):
        for _ in range(50):
            client.sendall(b"x")
            time.sleep(SHORT / 4)


def test_a_connection_goes_on_once_the_rest_of_a_refused_body_is_there(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REST_SECONDS", SLOW)
    client = connect(server, b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n")
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    client.sendall(b"x" * 10)
    time.sleep(SLOW + SHORT)
    client.sendall(request("/", b"last", CLOSE))
    assert until_end(client).endswith(b"last")


def test_a_client_that_does_not_read_ends_its_connection(server: Server, short: None) -> None:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(10)
    client.connect(("127.0.0.1", server.port))
    client.sendall(request("/large"))
    time.sleep(3 * SHORT)
    assert len(until_end(client)) < 32 << 20


def test_all_requests_of_a_connection_end_with_it(server: Server) -> None:
    client = connect(server, request("/slow", b"a") * 2)
    time.sleep(0.1)
    client.close()
    until = time.monotonic() + 5
    while not server.hung_up and time.monotonic() < until:
        time.sleep(0.02)
    assert server.hung_up == 1 and server.answered == 0


def test_idle_connections_keep_nobody_out() -> None:
    with serving(most=4) as server:
        busy = connect(server, request("/slow", b"busy"))
        time.sleep(0.1)
        idle = [connect(server, b"GET / HTT" if half else b"") for half in (True, False)]
        time.sleep(0.1)
        for _ in range(5):
            assert until_end(connect(server, request("/", b"new", CLOSE))).endswith(b"new")
        # The one that was idle for longest made room; the request that runs did not.
        assert until_end(idle[0]) == b""
        assert until_end(busy).endswith(b"busy")


def test_trailers_are_neither_kept_nor_endless(server: Server) -> None:
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTrailer: a\r\n\r\n1\r\na\r\n0\r\n"
    some = chunked + b"aa: bb\r\n" * 300 + b"\r\n"
    assert until_end(connect(server, some + request("/", b"last", CLOSE))).endswith(b"last")
    for endless in (b"aa: bb\r\n" * 2000, b"v" * 16_000):
        client = connect(server, chunked + b"aa: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                client.sendall(endless)
                time.sleep(0.001)
            pytest.fail("16 MB of trailers were read")


def test_a_client_that_reads_slowly_gets_all(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_SECONDS", SLOW)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    client.settimeout(10)
    client.connect(("127.0.0.1", server.port))
    client.sendall(request("/large", head=CLOSE))
    received, until = 0, time.monotonic() + 2 * SLOW
    while time.monotonic() < until:
        received += len(client.recv(64 << 10))
        time.sleep(0.05)
    assert received < 32 << 20
    assert received + len(until_end(client)) > 32 << 20


def test_a_connection_lives_on_after_a_body_that_came_behind_another_request(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REST_SECONDS", SHORT)
    whole = request("/", b"second")
    client = connect(server, request("/", b"first") + whole[:-3])
    time.sleep(SHORT / 4)
    client.sendall(whole[-3:])
    time.sleep(3 * SHORT)
    client.sendall(request("/", b"last", CLOSE))
    assert until_end(client).endswith(b"last")


def test_a_connection_that_was_idle_for_long_is_not_closed_under_its_next_request(server: Server) -> None:
    server._server.config.timeout_keep_alive = SHORT  # type: ignore[assignment]
    client = connect(server, b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n")
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    # The end of a refused body, with which the wait for a request begins, and that request come together.
    client.sendall(b"x" * 10 + request("/slow", b"last", CLOSE))
    assert until_end(client).endswith(b"last")


class Unread:
    """A connection to a client that does not read."""

    def __init__(self) -> None:
        self.is_closed = self.is_aborted = False

    def get_extra_info(self, _: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return 100

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True


def test_a_response_that_is_not_read_keeps_a_connection_only_for_a_while(short: None) -> None:
    async def run() -> None:
        transport, config = Unread(), uvicorn.Config(connect, interface="asgi3", ws="none", log_config=None)
        connection = connections.Connection(config, ServerState(), {}, asyncio.get_running_loop())
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection._clear_deadline()
        # It is no idle one, which would make room for another.
        assert not connection._is_idle
        connection.timeout_keep_alive_handler()
        connection.resume_writing()
        await asyncio.sleep(2 * SHORT)
        assert transport.is_closed and transport.is_aborted

    asyncio.run(run())
