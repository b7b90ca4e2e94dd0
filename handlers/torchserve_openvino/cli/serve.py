"""`torchserve-openvino serve`."""

import contextlib
import importlib.util
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from torchserve_openvino.cli.console import fail, steps
from torchserve_openvino.errors import TorchServeOpenVINOError

logger = logging.getLogger(__name__)

_PACKAGES = ("starlette", "uvicorn", "prometheus_client")
# A load that takes less is over before anyone reads how it goes.
_QUIET_SECONDS = 2.0
_LEAST_MEMORY = 10**6
# Events whose lines wait for a reader, and how long the last ones may take.
_MOST_LINES, _LAST_LINES_SECONDS = 1000, 2.0
_MOST_PORT, _MOST_WORKERS = 65_535, 1024


def serve(
    archives: Annotated[list[Path], typer.Argument(help="The .mar files; each model is at /predictions/NAME.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all, without any access control.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=_MOST_PORT, help="Port to listen on; 0 takes any.")] = 8080,
    workers: Annotated[
        str, typer.Option(help="Worker processes of each model: a number, or auto for its minWorkers.")
    ] = "auto",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of all workers, such as 8GB: above it, the models that were not used for longest rest.",
            show_default="no limit",
        ),
    ] = None,
    max_request_bytes: Annotated[
        int, typer.Option(min=1, max=1 << 30, help="Larger requests are refused (413).")
    ] = 6_553_500,
    grace: Annotated[float, typer.Option(min=0, help="Seconds in which what runs is answered after SIGTERM.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each event.")] = False,
) -> None:
    """Serve archives on this machine, without TorchServe and Java.

    URLs are TorchServe's, KServe's version 2, and those of OpenAI, Cohere,
    Jina and TEI. SIGTERM ends it once it has answered what it runs; SIGHUP
    reloads archives whose file has changed.

    Examples:

        torchserve-openvino serve net.mar

        torchserve-openvino serve a.mar b.mar --port 9000 --workers 2 --memory 8GB
    """
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        fail(f"{' and '.join(missing)} are not installed: pip install 'torchserve-openvino[serve]'")
    from torchserve_openvino.config.fields import bytes_of
    from torchserve_openvino.hosts.model_settings import LOG_FORMAT
    from torchserve_openvino.hosts.serve.server import ServerOptions, run

    try:
        most = bytes_of(memory) if memory is not None else None
    except ValueError as error:
        fail(f"--memory {error}")
    if most is not None and most < _LEAST_MEMORY:
        fail(f"--memory {memory} is {most} bytes, in which no worker runs: name a unit, such as 8GB")
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    options = ServerOptions(archives, host, port, _workers(workers), max_request_bytes, most, grace)
    start = time.monotonic()
    with _Lines() as lines, contextlib.ExitStack() as stack:
        show = None if as_json else stack.enter_context(_progress())

        def report(event: str, text: str, facts: Mapping[str, Any]) -> None:
            if as_json:
                lines.write(json.dumps({"event": event, "text": text, "seconds": _since(start), **facts}))
            elif event == "loading":
                if show is not None and _since(start) >= _QUIET_SECONDS:
                    show(text)
            elif event not in ("change", "listening"):
                stack.close()
                lines.write(text)

        try:
            run(options, report)
        except TorchServeOpenVINOError as error:
            stack.close()
            if as_json:
                lines.write(json.dumps({"event": "failed", "text": str(error), "seconds": _since(start)}))
                raise typer.Exit(1) from error
            fail(str(error))


class _Lines:
    """Writes lines to the standard output in a thread: that nobody reads them must not stop the server.

    Lines that find no room are dropped.
    """

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_LINES)
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)

    def __enter__(self) -> "_Lines":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(_LAST_LINES_SECONDS)

    def write(self, line: str) -> None:
        """Writes a line soon."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
            except OSError as error:
                logger.warning("nobody reads the standard output any more: %s", error)
                # What is left in its buffer would fail again at the end.
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, 1)
                os.close(nothing)
                return


def _since(start: float) -> float:
    return round(time.monotonic() - start, 2)


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """Yields what shows the step of a load: a spinner on a terminal, else nothing, as the log has it."""
    with steps(lambda text: None) as show:
        yield show


def _workers(value: str) -> int | None:
    if value == "auto":
        return None
    if not value.isdecimal() or not 1 <= int(value) <= _MOST_WORKERS:
        fail(f"--workers must be auto or a number from 1 to {_MOST_WORKERS}, not {value!r}")
    return int(value)
