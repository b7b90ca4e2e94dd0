"""`torchserve-openvino serve`."""

import contextlib
import importlib.util
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from torchserve_openvino.cli.console import fail, steps
from torchserve_openvino.errors import TorchServeOpenVINOError

_PACKAGES = ("starlette", "uvicorn", "prometheus_client")
# A load that takes less is over before anyone reads how it goes.
_QUIET_SECONDS = 2.0
_LEAST_MEMORY = 10**6
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
    with contextlib.ExitStack() as stack:
        show = None if as_json else stack.enter_context(_progress())

        def report(event: str, text: str, facts: Mapping[str, Any]) -> None:
            if as_json:
                typer.echo(json.dumps({"event": event, "text": text, "seconds": _since(start), **facts}))
                sys.stdout.flush()
            elif event == "loading":
                if show is not None and _since(start) >= _QUIET_SECONDS:
                    show(text)
            elif event not in ("change", "listening"):
                stack.close()
                typer.echo(text)
                sys.stdout.flush()

        try:
            run(options, report)
        except TorchServeOpenVINOError as error:
            stack.close()
            if as_json:
                typer.echo(json.dumps({"event": "failed", "text": str(error), "seconds": _since(start)}))
                raise typer.Exit(1) from error
            fail(str(error))


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
