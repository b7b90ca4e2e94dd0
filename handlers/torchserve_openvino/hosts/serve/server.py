"""`serve`: the front process. It listens, and imports neither torch nor OpenVINO; workers do."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prometheus_client
import uvicorn

try:
    import uvloop
except ImportError:
    uvloop = None  # type: ignore[assignment]

from torchserve_openvino.errors import ConfigError
from torchserve_openvino.hosts import http
from torchserve_openvino.hosts.prometheus import PrometheusMetrics
from torchserve_openvino.hosts.serve.connections import Connection
from torchserve_openvino.hosts.serve.registry import Registry
from torchserve_openvino.hosts.serve.routes import Site
from torchserve_openvino.hosts.serve.served_archive import FORGET, Record
from torchserve_openvino.hosts.serve.unpacked_folder import remove_abandoned

logger = logging.getLogger(__name__)

# Connections at a time. A new one ends one that is idle, or is refused (503) before its body is read.
_MOST_CONNECTIONS = 1000
_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 512
# Seconds in which responses are sent to their end, however short the grace is.
_LEAST_END_SECONDS = 1.0

# Gets an event's name, its text, and its facts.
Report = Callable[[str, str, Mapping[str, Any]], None]


@dataclass(frozen=True)
class ServerOptions:
    """Options of `serve`.

    Attributes:
        archives: Paths of .mar files.
        host: Address to listen on.
        port: Port to listen on; 0 for any that is free.
        workers: Workers of each model; None leaves that to its ``minWorkers``.
        max_request_bytes: Most bytes of a request's body.
        memory: Most bytes that all workers may have; None sets no limit.
        grace: Seconds in which what runs is answered once the server is to stop.
    """

    archives: list[Path]
    host: str = "127.0.0.1"
    port: int = 8080
    workers: int | None = None
    max_request_bytes: int = http.LARGEST
    memory: int | None = None
    grace: float = 30.0


class _Uvicorn(uvicorn.Server):
    """A web server that leaves signals to this module."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Changes nothing."""
        yield


def run(options: ServerOptions, report: Report) -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
        options: What to serve, and where.
        report: Gets what happens: ``listening``, ``loading``, ``change``, ``ready``, ``stopping``, ``stopped``.

    Raises:
        ConfigError: The address can't be used, or a YAML is not valid.
        PackagingError: A file is no archive.
        ModelLoadError: A model is refused.
    """
    # asyncio's own loop takes twice the time of each request; uvloop has none for Windows.
    runs = uvloop.run if uvloop is not None else asyncio.run
    runs(_run(options, report))


def _listening(host: str, port: int) -> socket.socket:
    """Returns a socket that listens.

    Raises:
        ConfigError: The address can't be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small packets at once only on sockets with this protocol; else each response waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ConfigError(
            f"{host}:{port} cannot be listened on: {reason}. Choose another port (--port 0 takes any that is free) or "
            "address (--host)."
        ) from error
    return listener


def _recorder(registry: prometheus_client.CollectorRegistry) -> Record:
    """Returns what takes metrics from any thread."""
    metrics, lock = PrometheusMetrics(registry), threading.Lock()

    def record(kind: str, name: str, value: float, labels: Mapping[str, str]) -> None:
        with lock:
            if kind == FORGET:
                metrics.forget(name, labels[name])
            else:
                metrics.record(kind, name, value, labels)

    return record


async def _run(options: ServerOptions, report: Report) -> None:
    remove_abandoned()
    metrics = prometheus_client.CollectorRegistry()
    registry = Registry(
        options.archives, options.workers, _recorder(metrics), options.memory, lambda text: report("change", text, {})
    )
    site = Site(registry, metrics, options.max_request_bytes)
    listener = _listening(options.host, options.port)
    config = uvicorn.Config(
        site.app(), log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        limit_concurrency=_MOST_CONNECTIONS, server_header=False, proxy_headers=False, http=Connection, ws="none",
    )  # fmt: skip
    server = _Uvicorn(config)
    ended, hurried = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        """Ends the server after what runs; a second signal ends it at once."""
        (hurried if ended.is_set() else ended).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGHUP, registry.reload_changed)
    serving = asyncio.create_task(server.serve([listener]))
    shown = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{shown}:{listener.getsockname()[1]}"
    report("listening", f"listening on {url}; models load", {"url": url})
    try:
        await _until_ended(registry, ended, url, report)
        report("stopping", "what runs is answered, new requests are refused", {})
    finally:
        site.drains = True
        hurry = asyncio.create_task(hurried.wait())
        grace = options.grace if ended.is_set() else 0
        until = loop.time() + grace
        await _stop_models(registry, grace, hurry)
        server.should_exit = True
        await _end_connections(server, serving, max(_LEAST_END_SECONDS, until - loop.time()), hurry)
        hurry.cancel()
        listener.close()
    report("stopped", "the server has ended", {})


async def _stop_models(registry: Registry, grace: float, hurry: asyncio.Task[Any]) -> None:
    """Lets models answer what waits and runs, for at most so many seconds, or until it is to end at once."""
    stopping = asyncio.create_task(registry.stop(grace))
    await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        registry.kill("the server stops at once")
    await stopping


async def _end_connections(
    server: _Uvicorn, serving: asyncio.Task[None], seconds: float, hurry: asyncio.Task[Any]
) -> None:
    """Sends responses to their end, for at most so many seconds: a client may not read, or not send its request."""
    await asyncio.wait({serving, hurry}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await asyncio.wait({serving}, timeout=_LEAST_END_SECONDS)
    if not serving.done():
        server.force_exit = True
    await serving


async def _until_ended(registry: Registry, ended: asyncio.Event, url: str, report: Report) -> None:
    """Loads all models, and waits for the end.

    Raises:
        TorchServeOpenVINOError: A model is refused.
    """
    starting, stopping = asyncio.create_task(registry.start()), asyncio.create_task(ended.wait())
    showing = asyncio.create_task(_show_steps(registry, report))
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        showing.cancel()
    if starting.done():
        # Raises why a model is refused.
        starting.result()
        models = [model.label for model in registry]
        names = registry.names
        address = f"{url}/predictions/{names[0] if len(names) == 1 else 'NAME'}"
        report("ready", f"READY: {', '.join(models)} on {address}", {"url": url, "models": models})
        await stopping
    else:
        starting.cancel()
        await asyncio.wait({starting})


async def _show_steps(registry: Registry, report: Report) -> None:
    """Reports what each model that loads does, when that changes."""
    shown: dict[str, str] = {}
    while True:
        for model in registry:
            if model.state == "loading" and shown.get(model.label) != model.step:
                shown[model.label] = model.step
                report("loading", f"{model.label}: {model.step}", {"model": model.settings.name, "step": model.step})
        await asyncio.sleep(0.2)
