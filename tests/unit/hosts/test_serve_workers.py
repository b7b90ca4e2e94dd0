"""The two sides of a worker of `serve`: whatever a handler, a worker or a client does, each request gets one answer."""

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ts.protocol.otf_message_handler import create_predict_response

from torchserve_openvino.errors import ItemError, ModelCallError
from torchserve_openvino.hosts.serve import worker, worker_process
from torchserve_openvino.hosts.serve.frames import Frame, packed, read_frame
from torchserve_openvino.hosts.serve.worker import WorkerConnection
from torchserve_openvino.hosts.serve.worker_process import Pending, WorkerLostError, WorkerProcess
from torchserve_openvino.report import CompileReport, Tracker
from torchserve_openvino.serving.metrics import MetricsEmitter
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.requests.isolation import run_isolated
from torchserve_openvino.serving.requests.messages import Request, Response
from torchserve_openvino.serving.requests.refusals import RefusalForm
from torchserve_openvino.serving.torchserve.cached_metrics import HostMetrics
from torchserve_openvino.serving.torchserve.context import Context, only, with_own_headers

PLAIN = "text/plain"


class Panic(BaseException):
    """As a library in Rust raises it."""


class Service:
    """Answers as a test says."""

    def __init__(self, answer: Callable[[Request], Response], awaits: bool = False, report: Any = None) -> None:
        self._answer, self.awaits, self._report, self.ended = answer, awaits, report, ""
        self.counted: list[int] = []

    def answer(self, requests: Sequence[Request]) -> list[Response]:
        return [self._answer(request) for request in requests]

    async def answer_alone(self, request: Request) -> Response:
        return self._answer(request)

    def describe(self) -> Any:
        return self._report

    def send_counts(self) -> None:
        pass

    def refused(self, error: ItemError, name: str, form: RefusalForm | None) -> Response:
        self.counted.append(error.status)
        return Response.refused(error, name, form)


def replies(service: Service, *messages: bytes, count: int = 1) -> list[Frame]:
    """What a worker sends for messages that come at once."""

    async def run() -> list[Frame]:
        (front, commands), (answers, connection) = socket.socketpair(), socket.socketpair()
        made = WorkerConnection(commands, connection, Path(), 1)
        made._service = service  # type: ignore[assignment]
        threading.Thread(target=made._main.run, daemon=True).start()
        front.sendall(b"".join(messages))
        reader, _writer = await asyncio.open_connection(sock=answers)
        reading = asyncio.create_task(made._read())
        frames = [await asyncio.wait_for(read_frame(reader), 10) for _ in range(count)]
        front.close()
        await reading
        return [frame for frame in frames if frame is not None]

    return asyncio.run(run())


def call(*bodies: bytes, path: str = "") -> bytes:
    heads = [
        {"bytes": len(body), "type": PLAIN, "parameters": {}, "headers": {"url_path": path}, "id": f"id-{index}",
         "envelope": None, "arrived": 0.0}
        for index, body in enumerate(bodies)
    ]  # fmt: skip
    return packed({"kind": "call", "call": 1, "requests": heads}, b"".join(bodies))


def test_a_client_that_is_gone_before_its_call_begins_is_known() -> None:
    service = Service(lambda request: Response(str(request.is_gone()).encode(), PLAIN), awaits=True)
    (done,) = replies(service, call(b"a"), packed({"kind": "gone", "call": 1, "index": 0}))
    assert done.body == b"True"


@pytest.mark.parametrize("error", [Panic("a panic"), MemoryError()], ids=["panic", "memory"])
def test_a_call_that_fails_outside_the_handler_is_answered(error: BaseException) -> None:
    def answer(request: Request) -> Response:
        raise error

    service = Service(answer)
    (done,) = replies(service, call(b"a", b"b", path="v1/embeddings"))
    assert [each["status"] for each in done.head["answers"]] == [500, 500] and service.counted == [500, 500]
    assert b'"server_error"' in done.body and b'"id-1"' in done.body


def test_a_body_for_which_there_is_no_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def row_of(body: bytes, *_: Any) -> dict[str, Any]:
        if body == b"large":
            raise MemoryError
        return {"body": body}

    monkeypatch.setattr(worker, "row_of", row_of)
    service = Service(lambda request: Response(request.row["body"], PLAIN))
    (done,) = replies(service, call(b"large", b"small"))
    assert {each["index"]: each["status"] for each in done.head["answers"]} == {0: 413, 1: 200}
    assert service.counted == [413]


def test_a_report_that_is_no_json_is_an_error_and_blocks_no_other() -> None:
    describe = packed({"kind": "describe"})
    for frame in replies(Service(lambda _: Response(b""), report={1j: object()}), describe, describe, count=2):
        assert "TypeError" in frame.head["report"]["error"]


def test_a_first_piece_has_the_headers_that_a_handler_sets() -> None:
    def answer(request: Request) -> Response:
        context = Context({}, "", {}, 1, None).for_requests([request])
        context.set_response_header(0, "X-Mine", "1")
        context.set_response_header(0, "Content-Length", "1")
        for text in ("a", "b"):
            context.cl_socket.sendall(create_predict_response([text], {0: request.id}, "", 200, context, True))
        return Response(b"", PLAIN)

    first, second, _ = replies(Service(answer), call(b""), count=3)
    assert (first.head["headers"], second.head["headers"]) == ({"X-Mine": "1"}, {})


# --- the front process's side -------------------------------------------------------------------------------------


def pieces_of(pending: Pending) -> list[Response]:
    async def read() -> list[Response]:
        return [piece async for piece in pending.pieces()]

    return asyncio.run(asyncio.wait_for(read(), 5))


def lost(prepare: Callable[[WorkerProcess], None], timeout: float) -> tuple[str, Pending]:
    """How a call with one request ends."""

    async def run() -> tuple[str, Pending]:
        process, pending = WorkerProcess(Path(), 1), Pending(b"a")
        prepare(process)
        with pytest.raises(WorkerLostError) as error:
            await asyncio.wait_for(process.call([pending], timeout), 5)
        return str(error.value), pending

    return asyncio.run(run())


def test_a_hung_call_is_given_up_though_its_limit_is_that_of_a_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_CANCEL_SECONDS", 0.05)
    reason, pending = lost(lambda process: setattr(process, "awaits", True), 0.05)
    assert "responseTimeout (0.05 s)" in reason and [piece.status for piece in pieces_of(pending)] == [503]


class DeadWriter:
    def write(self, _: bytes) -> None:
        raise RuntimeError("the handler is closed")


def test_a_worker_that_takes_no_messages_is_lost() -> None:
    def dies(process: WorkerProcess) -> None:
        process._writer = DeadWriter()  # type: ignore[assignment]
        asyncio.get_running_loop().call_later(0.05, process.ended.set_result, "signal SIGKILL")

    reason, pending = lost(dies, 5)
    assert "signal SIGKILL" in reason and [piece.status for piece in pieces_of(pending)] == [503]


# --- responses ----------------------------------------------------------------------------------------------------


def test_a_request_whose_pieces_were_sent_is_not_answered_again() -> None:
    sent: list[Response] = []
    requests = [Request({}, id=name, send=sent.append) for name in ("begun", "other")]
    context = Context({}, "", {}, 2, None).for_requests(requests)

    def run(some: list[tuple[int, str]]) -> list[str]:
        with only(context, [index for index, _ in some], 2):
            if "begun" in dict(some).values():
                requests[0].send(Response(b"piece", PLAIN))
            if len(some) > 1:
                raise ValueError("the batch fails")
            return ["answer"]

    def blame(_: Any, error: Exception) -> ItemError:
        return ModelCallError(str(error))

    begun, other = run_isolated(list(enumerate(["begun", "other"])), run, blame, Counters())
    assert begun.status == 500 and "piece" in str(begun) and other == "answer" and len(sent) == 1


@pytest.mark.parametrize("status", ["busy", None, 1000, 100])
def test_a_status_that_is_none_fails_its_own_request(status: Any) -> None:
    context = Context({}, "", {}, 2, None).for_requests([Request({}), Request({})])
    context.set_response_status(status, idx=0)
    bad, good = with_own_headers(["a", "b"], context)
    assert isinstance(bad, ModelCallError) and repr(status) in str(bad) and good.status == 200
    with pytest.raises(ValueError, match="cannot have the status"):
        Response(b"", status=status).encoded()


def test_counts_of_a_host_without_lines_to_parse_are_not_held_back() -> None:
    values: list[float] = []
    counters = Counters()

    def record(kind: str, name: str, value: float, labels: Any) -> None:
        values.extend([value] if "padded_rows" in name else [])

    emitter = MetricsEmitter(CompileReport(Tracker()), counters)
    for count in (1, 2):
        counters.add("padded_rows", count)
        emitter.emit(HostMetrics(record))
    assert values == [1, 2]
