"""A worker of `serve`: one process that loads an unpacked archive, and answers what the front process sends.

    python -m torchserve_openvino.hosts.serve.worker FOLDER WORKERS SOCKET

Messages (`frames.py`) come on its standard input, and go to the socket with this file descriptor. It ends when the
front process closes its side.
"""

import asyncio
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torchserve_openvino.errors import ItemError, ModelCallError, TorchServeOpenVINOError, class_and_line
from torchserve_openvino.files.json_text import JsonError
from torchserve_openvino.hosts.archive_service import ArchiveService, row_of
from torchserve_openvino.hosts.background import background
from torchserve_openvino.hosts.model_settings import LOG_FORMAT
from torchserve_openvino.hosts.serve.frames import Frame, packed, read_frame
from torchserve_openvino.report.quiet import quiet_libraries
from torchserve_openvino.serving.requests.isolation import isolated
from torchserve_openvino.serving.requests.messages import PATH_HEADER, Request, Response
from torchserve_openvino.tasks.standard.refusal_forms import form_of_path

logger = logging.getLogger(__name__)

# Metrics are sent with the end of a call, but not more often than this, and after this long without one.
_METRICS_SECONDS = 0.5
_LOADING = "LOADING: "


class _Steps(logging.Handler):
    """Passes on the lines in which a load names its present step."""

    def __init__(self, send: Any) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(_LOADING):
            self._send({"kind": "step", "text": text.removeprefix(_LOADING)})


class _Metrics:
    """Metrics until they are sent: counters are added up, gauges keep the last value, histograms all of them."""

    def __init__(self) -> None:
        self._values: dict[tuple[Any, ...], Any] = {}
        self._lock = threading.Lock()
        self._taken = 0.0

    def record(self, kind: str, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Takes one value, from any thread; see `serving.requests.metric_sink.Record`."""
        key = (kind, name, *labels.items())
        with self._lock:
            if kind == "gauge":
                self._values[key] = value
            elif kind == "counter":
                self._values[key] = self._values.get(key, 0.0) + value
            else:
                self._values.setdefault(key, []).append(value)

    def take(self, least_seconds: float = 0.0) -> list[tuple[str, str, Any, dict[str, str]]]:
        """Returns what came since the last time; nothing if that is less than so many seconds ago."""
        now = time.monotonic()
        with self._lock:
            if not self._values or now - self._taken < least_seconds:
                return []
            values, self._values, self._taken = self._values, {}, now
        return [(kind, name, value, dict(labels)) for (kind, name, *labels), value in values.items()]


class _MainThread(Executor):
    """Runs calls in the thread that loaded the model.

    A second thread would keep memory of its own (glibc has an arena for each), and threads of its own for PyTorch's
    operators: OpenMP has a pool for each thread that starts parallel work.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Has a function called, from any thread."""
        future: Future[Any] = Future()
        self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def run(self) -> NoReturn:
        """Runs what is submitted, in the thread that calls this."""
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            # What a call got and gave does not wait for the next one.
            del future, call


class WorkerConnection:
    """Answers the messages of one connection.

    Args:
        commands: Messages come from it.
        connection: Messages go to it.
        folder: The unpacked archive.
        workers: Workers of the model.
    """

    def __init__(self, commands: socket.socket, connection: socket.socket, folder: Path, workers: int) -> None:
        self._commands, self._connection = commands, connection
        self._folder, self._workers = folder, workers
        self._writing = threading.Lock()
        self._metrics = _Metrics()
        # A handler takes one call at a time.
        self._main = _MainThread()
        self._gone: dict[int, set[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._service: ArchiveService | None = None

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        """Sends a message, from any thread; the front process always reads."""
        self._write(packed(head, body))

    def _write(self, message: bytes) -> None:
        with self._writing:
            try:
                self._connection.sendall(message)
            except OSError:
                # The reader sees the end, too, and ends this process.
                logger.debug("the front process is gone")

    def _send_metrics(self) -> None:
        if metrics := self._metrics.take():
            self.send({"kind": "metrics", "metrics": metrics})

    def load(self) -> bool:
        """Loads the archive; returns False if it is refused, after the front process has the reason."""
        steps = _Steps(self.send)
        progress = logging.getLogger("torchserve_openvino.report.progress")
        progress.addHandler(steps)
        try:
            record = self._metrics.record
            self._service = ArchiveService(self._folder, record, workers=self._workers, keeps_idle=False)
        except (TorchServeOpenVINOError, JsonError, RuntimeError) as error:
            self.send({"kind": "refused", "reason": str(error)})
            return False
        finally:
            progress.removeHandler(steps)
        self._send_metrics()
        self.send({"kind": "ready", "awaits": self._service.awaits})
        return True

    def run(self) -> NoReturn:
        """Answers in this thread, until the front process closes the connection and another one ends the process."""
        threading.Thread(target=self._read_to_the_end, name="connection", daemon=True).start()
        self._main.run()

    def _read_to_the_end(self) -> NoReturn:
        code = 1
        try:
            asyncio.run(self._read())
            if self._service is not None:
                self._service.send_counts()
                self._send_metrics()
                self._service.send_spans()
            code = 0
        except Exception:
            logger.exception("the connection to the front process failed")
        finally:
            # A call that hangs, and a thread of native code, must not keep this process: nobody waits for it any more.
            logging.shutdown()
            os._exit(code)

    async def _read(self) -> None:
        reader, _writer = await asyncio.open_connection(sock=self._commands)
        background(self._metrics_from_time_to_time(), self._tasks)
        while (frame := await read_frame(reader, trusted=True)) is not None:
            kind = frame.head["kind"]
            if kind == "call":
                # Not in the task, which may begin only after the news that a client is gone.
                self._gone[frame.head["call"]] = set()
                background(self._call(frame), self._tasks)
            elif kind == "gone":
                self._gone.get(frame.head["call"], set()).add(frame.head["index"])
            elif kind == "describe":
                background(self._describe(), self._tasks)

    async def _metrics_from_time_to_time(self) -> None:
        assert self._service is not None
        while True:
            await asyncio.sleep(_METRICS_SECONDS)
            self._service.send_counts()
            self._send_metrics()

    async def _describe(self) -> None:
        assert self._service is not None
        try:
            report = await asyncio.get_running_loop().run_in_executor(self._main, self._service.describe)
            # Whatever a handler reports: one that can't be sent must not keep the front process waiting.
            message = packed({"kind": "report", "report": report})
        except Exception as error:
            logger.exception("the report failed")
            message = packed({"kind": "report", "report": {"error": f"{type(error).__name__}: {error}"}})
        self._write(message)

    async def _call(self, frame: Frame) -> None:
        """Answers a call; whatever happens, each of its requests gets an answer."""
        assert self._service is not None
        number, heads = frame.head["call"], frame.head["requests"]
        try:
            if self._service.awaits:
                await self._answer_alone(frame)
            else:
                # The thread that answers sends, too: to wake this one first takes longer than to send.
                await asyncio.get_running_loop().run_in_executor(self._main, self._answer_together, frame)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # Such as the panic of a library in Rust, which is no Exception.
            logger.exception("a call failed")
            fault = ModelCallError(f"the server failed on this call: {class_and_line(error)}")
            refused = {index: self._refused(fault, head) for index, head in enumerate(heads)}
            self._send_answers(number, refused)
        finally:
            del self._gone[number]

    async def _answer_alone(self, frame: Frame) -> None:
        """Answers the request of a call."""
        assert self._service is not None
        requests, answers = self._requests(frame)
        for index, request in requests.items():
            answers[index] = await self._service.answer_alone(request)
        self._send_answers(frame.head["call"], answers)

    def _answer_together(self, frame: Frame) -> None:
        """Answers the requests of a call, in the thread that loaded the model."""
        assert self._service is not None
        requests, answers = self._requests(frame)
        if requests:
            answers.update(zip(requests, self._service.answer(list(requests.values())), strict=True))
        self._send_answers(frame.head["call"], answers)

    def _requests(self, frame: Frame) -> tuple[dict[int, Request], dict[int, Response]]:
        """Returns the requests of a call, and the refusals of those that can't be read."""
        number = frame.head["call"]
        gone = self._gone[number]

        def send(index: int, piece: Response) -> None:
            piece = piece.encoded()
            head = {"kind": "piece", "call": number, "index": index, "type": piece.content_type}
            self.send({**head, "status": int(piece.status), "headers": dict(piece.headers)}, piece.body)

        requests: dict[int, Request] = {}
        refused: dict[int, Response] = {}
        start = 0
        for index, head in enumerate(frame.head["requests"]):
            body, start = frame.body[start : start + head["bytes"]], start + head["bytes"]
            row = isolated(partial(row_of, body, head["type"], head["parameters"]))
            if isinstance(row, ItemError):
                refused[index] = self._refused(row, head)
                continue
            requests[index] = Request(
                row, head["headers"], head["id"], head["envelope"], head["arrived"], send=partial(send, index),
                is_gone=partial(gone.__contains__, index),
            )  # fmt: skip
        return requests, refused

    def _refused(self, error: ItemError, head: Mapping[str, Any]) -> Response:
        assert self._service is not None
        form = form_of_path(head["headers"].get(PATH_HEADER, ""), head["envelope"])
        return self._service.refused(error, head["id"], form)

    def _send_answers(self, number: int, answers: Mapping[int, Response]) -> None:
        """Sends the answers of a call in one message: each costs the front process as much as reading a request."""
        assert self._service is not None
        heads = [
            {"index": index, "type": answer.content_type, "status": int(answer.status), "bytes": len(answer.body),
             "headers": dict(answer.headers)}
            for index, answer in answers.items()
        ]  # fmt: skip
        head = {"kind": "done", "call": number, "ended": self._service.ended, "answers": heads}
        if self._service.ended:
            # The front process kills this one then: what was counted comes with its last answers.
            self._service.send_counts()
        if metrics := self._metrics.take(0.0 if self._service.ended else _METRICS_SECONDS):
            head["metrics"] = metrics
        self.send(head, b"".join(answer.body for answer in answers.values()))


def main() -> None:
    """Serves the archive of the command line until the front process ends it."""
    # What a model prints belongs in the log.
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    quiet_libraries()
    # Ctrl-C in a terminal, and systemd, reach all processes of the group: the front process says when this one ends.
    # Handlers, since processes that the model starts would inherit that a signal is ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    commands, connection = socket.socket(fileno=os.dup(0)), socket.socket(fileno=int(sys.argv[3]))
    # Processes that the model starts get neither, and those that it forks close them: while one has them open, this one
    # does not seem to end.
    os.set_inheritable(connection.fileno(), False)
    for end in (commands, connection):
        os.register_at_fork(after_in_child=end.close)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    worker = WorkerConnection(commands, connection, Path(sys.argv[1]), int(sys.argv[2]))
    if not worker.load():
        sys.exit(1)
    worker.run()


if __name__ == "__main__":
    main()
