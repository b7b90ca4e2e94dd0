"""The servers: how each is started and stopped, where it answers, and which processes it has."""

from __future__ import annotations

import getpass
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from server import TorchServeProcess, stop_group

from benchmarks.servers import usage
from build_efficientnet_mar import archiver_command, run_archiver
from torchserve_openvino.bench.ports import HOST, free_ports

HERE = Path(__file__).resolve().parent
EAGER, TUNED = "torchserve-eager", "torchserve-eager-tuned"
INDUCTOR, OURS, LITSERVE, RAY = "torchserve-inductor", "ours", "litserve-openvino", "ray"
NAMES = (EAGER, TUNED, INDUCTOR, OURS, LITSERVE, RAY)
CONFIGS = {EAGER: HERE / "eager.yaml", TUNED: HERE / "eager-tuned.yaml", INDUCTOR: HERE / "inductor.yaml"}
START_SECONDS = 900.0
COMPILERS = ("c++", "g++", "clang++")


class SkippedError(RuntimeError):
    """This machine cannot run the contender; the message says why."""


class StartError(RuntimeError):
    """The server did not come up; the message carries the end of its log."""


@dataclass(frozen=True)
class Options:
    """What the command line chooses.

    Attributes:
        ours_config: model-config.yaml of `ours`.
        precision: `f32` or `bf16`, of `ours` and of LitServe; with `auto`, `ours` decides, and LitServe has bf16.
        properties: Further lines of config.properties for every TorchServe.
    """

    ours_config: Path = HERE / "ours.yaml"
    properties: Mapping[str, str] = field(default_factory=dict)
    litserve_workers: int = 2
    litserve_batch: int = 1
    litserve_api_servers: int = 2
    precision: str = "f32"


@dataclass(frozen=True)
class Running:
    """A server that answers.

    Attributes:
        url: Where to POST a photo.
        root: Pid of the server's topmost process.
        workers: Pids of those that run the model.
        settings: How it was configured, for the JSON.
        log_tail: The end of its logs.
    """

    url: str
    root: int
    workers: list[int]
    settings: dict[str, Any]
    log_tail: Callable[[], str]


@contextmanager
def serve(name: str, options: Options, work: Path) -> Iterator[Running]:
    """Starts a contender, and stops it with all its processes on exit.

    Args:
        name: One of `NAMES`.
        work: A folder for archives and the like, which may be shared.

    Raises:
        SkippedError: It cannot run here.
    """
    if name in {LITSERVE, RAY}:
        with _litserve(options) if name == LITSERVE else _ray(options, work) as running:
            yield running
        return
    config = {**CONFIGS, OURS: options.ours_config}[name]
    if name == INDUCTOR and not _has_compiler():
        raise SkippedError("no C++ compiler (set CXX, or install g++)")
    handler = None if name == OURS else str(HERE / "plain_handler.py")
    with _torchserve(name, config, handler, options, work) as running:
        yield running


def _in_precision(settings: dict[str, Any], precision: str) -> dict[str, Any]:
    """A model-config in another precision, which the handler's own measure judges."""
    settings["pt2"]["compile"]["options"]["config"].pop("INFERENCE_PRECISION_HINT", None)
    section = settings["handler"]["openvino"]
    section["precision"] = precision
    section["verify"].pop("max_abs", None)
    return settings


def _has_compiler() -> bool:
    chosen = os.environ.get("CXX")
    return any(shutil.which(one) for one in ([chosen] if chosen else COMPILERS))


@contextmanager
def _torchserve(name: str, config: Path, handler: str | None, options: Options, work: Path) -> Iterator[Running]:
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    if name == OURS and options.precision != "f32":
        config = work / f"ours-{options.precision}.yaml"
        settings = _in_precision(settings, options.precision)
        config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    run_archiver(archiver_command(work, name, config, handler))
    workers = int(settings.get("minWorkers", 1))
    properties = {"default_workers_per_model": str(workers), **options.properties}
    # Inductor's default cache: inside the server, TMPDIR is a folder that is deleted with it.
    kernels = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    environment = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(kernels))}
    server = TorchServeProcess(work, models={name: f"{name}.mar"}, properties=properties, environment=environment)
    try:
        root = start(server, name, workers)
        # The frontend starts workers with this file.
        pids = [p.pid for p in usage.tree(root) if any("model_service_worker" in part for part in p.cmdline())]
        url = f"{server.inference_url}/predictions/{name}"
        yield Running(url, root, pids, {"model_config": settings, "properties": properties}, server.log_tail)
    finally:
        with _uninterrupted():
            server.stop()


def start(server: TorchServeProcess, name: str, workers: int) -> int:
    """Starts a TorchServe, waits until all workers of a model are ready, and returns the topmost process.

    Raises:
        StartError: It ended, or took too long.
    """
    server.start()
    server.wait_healthy()
    server.wait_ready(name, timeout=START_SECONDS)
    # wait_ready sees only the workers that exist so far; more may follow.
    _wait(lambda: _ready_workers(server, name) >= workers, server.log_tail, lambda: server.alive)
    root = server.group
    if root is None:
        raise StartError("TorchServe is gone")
    return root


def _ready_workers(server: TorchServeProcess, model: str) -> int:
    try:
        answer = server.http.get(f"{server.management_url}/models/{model}").json()
    except httpx.TransportError:
        return 0
    return sum(worker["status"] == "READY" for worker in answer[0]["workers"])


@contextmanager
def _litserve(options: Options) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="tsov-lit-") as folder:
        command = [str(HERE / "litserve_app.py"), "--state", folder, "--workers", str(options.litserve_workers)]
        command += ["--batch", str(options.litserve_batch), "--api-servers", str(options.litserve_api_servers)]
        command += ["--precision", options.precision.replace("auto", "bf16")]

        def pids(_: str) -> list[int]:
            return [int(path.stem) for path in Path(folder).glob("*.worker")]

        settings = {"workers": options.litserve_workers, "batch": options.litserve_batch}
        with _program(
            command, Path(folder), "/predict", "/health", pids, options.litserve_workers, settings
        ) as running:
            yield running


@contextmanager
def _ray(options: Options, work: Path) -> Iterator[Running]:
    """The archive of `ours`, with as many replicas as it has workers there, of one core each."""
    if importlib.util.find_spec("ray") is None:
        raise SkippedError("Ray is not installed (the extra ray)")
    settings = yaml.safe_load(options.ours_config.read_text(encoding="utf-8"))
    workers = int(settings.get("minWorkers", 1))
    run_archiver(archiver_command(work, RAY, options.ours_config))
    command = ["-m", "torchserve_openvino.cli", "ray", "deploy", str(work / f"{RAY}.mar")]
    command += ["--replicas", str(workers), "--haproxy"]

    def pids(url: str) -> list[int]:
        return [
            replica["pid"] for replica in httpx.get(f"{url}/models/{RAY}/replicas", trust_env=False, timeout=30).json()
        ]

    with (
        tempfile.TemporaryDirectory(prefix="tsov-ray-") as folder,
        _program(command, Path(folder), f"/predictions/{RAY}", f"/models/{RAY}", pids, workers, settings) as running,
    ):
        yield running


@contextmanager
def _program(
    command: list[str],
    folder: Path,
    path: str,
    health: str,
    pids: Callable[[str], list[int]],
    workers: int,
    settings: dict[str, Any],
) -> Iterator[Running]:
    """Starts a Python program that serves on the port that it is given, and waits until all its workers are ready."""
    port = free_ports(1)[0]
    command, log = [sys.executable, *command, "--port", str(port)], folder / "console.log"
    with log.open("wb") as console:
        process = subprocess.Popen(
            command,
            # Holds sockets of worker processes, which are removed with the folder.
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def log_tail() -> str:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])

    url = f"http://{HOST}:{port}"
    try:
        _wait(
            lambda: _healthy(f"{url}{health}") and len(pids(url)) == workers,
            log_tail,
            lambda: process.poll() is None,
        )
        yield Running(f"{url}{path}", process.pid, pids(url), {"command": command[1:], **settings}, log_tail)
    finally:
        with _uninterrupted():
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                # Ray ends HAProxy, which is in a process group of its own.
                process.wait(timeout=30)
            stop_group(process.pid)
            process.wait(timeout=15)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=5).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _wait(done: Callable[[], bool], log_tail: Callable[[], str], alive: Callable[[], bool]) -> None:
    end = time.monotonic() + START_SECONDS
    while not done():
        if not alive() or time.monotonic() > end:
            raise StartError(f"the server {'took too long' if alive() else 'ended'}\n{log_tail()}")
        time.sleep(0.2)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave half of a server running."""
    before = {one: signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
