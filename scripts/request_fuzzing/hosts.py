"""Servers to fuzz, each started here, on free ports of the loopback interface, and stopped here."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

sys.path.append(str(Path(__file__).resolve().parents[1] / "lib"))
from server import TorchServeProcess, stop_group

from request_fuzzing.payloads import Payload
from torchserve_openvino.bench.ports import HOST, free_ports

_READY_SECONDS = 180.0


class HostMissingError(RuntimeError):
    """A host whose packages are not installed."""


class Server(ABC):
    """A running server with one model."""

    def __init__(self) -> None:
        # One connection for each request, as from different clients.
        self.http = httpx.Client(trust_env=False, timeout=120, limits=httpx.Limits(max_keepalive_connections=0))

    def post(self, payload: Payload) -> httpx.Response:
        """Sends a request."""
        headers = {"content-type": payload.content_type} if payload.content_type else {}
        return self.http.post(self.url(payload.path), content=payload.body, headers=headers)

    def takes(self, payload: Payload) -> bool:
        """Whether the host's protocol has a place for a request."""
        return True

    @abstractmethod
    def url(self, path: str) -> str:
        """Returns where requests are sent to."""

    @abstractmethod
    def worker(self) -> psutil.Process:
        """Returns the process that holds the model."""

    @abstractmethod
    def log_tail(self) -> str:
        """Returns the last lines of the log."""

    def rss(self) -> int:
        """Returns the memory of the worker and of its children, in bytes."""
        worker = self.worker()
        total = 0
        for process in (worker, *worker.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total


class TorchServe(Server):
    """TorchServe with one worker."""

    def __init__(self, process: TorchServeProcess, model: str) -> None:
        super().__init__()
        self._process, self._model = process, model

    def url(self, path: str) -> str:
        """Returns the model's address."""
        # Before a path there has to be the version: TorchServe takes `v1` for one.
        return f"{self._process.inference_url}/predictions/{self._model}{'/1.0/' + path if path else ''}"

    def worker(self) -> psutil.Process:
        """Returns the only worker."""
        (worker,) = self._process.workers(self._model)
        return psutil.Process(int(worker["pid"]))

    def log_tail(self) -> str:
        """Returns the last lines of TorchServe's logs."""
        return self._process.log_tail(80)


class Command(Server):
    """A server that is one process with its children.

    Args:
        process: It.
        url: The model's address.
        log: Its output.
        title: Part of the name of the process that holds the model; empty for the process itself.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path, title: str = "") -> None:
        super().__init__()
        self._process, self._url, self._log, self._title = process, url, log, title

    def url(self, path: str) -> str:
        """Returns the model's address."""
        return f"{self._url}/{path}" if path else self._url

    def worker(self) -> psutil.Process:
        """Returns the process that holds the model."""
        own = psutil.Process(self._process.pid)
        children = [child for child in own.children(recursive=True) if self._title in " ".join(child.cmdline())]
        return children[0] if self._title and children else own

    def log_tail(self) -> str:
        """Returns the last lines of its output."""
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-80:])

    def wait(self, ready: str) -> None:
        """Waits until an address answers 200.

        Raises:
            RuntimeError: It does not in time.
        """
        end = time.monotonic() + _READY_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self.http.get(ready).status_code == httpx.codes.OK:
                    return
            time.sleep(0.3)
        raise RuntimeError(f"the server did not come up\n{self.log_tail()}")


class KServe(Command):
    """KServe's predictor, which has JSON only: its protocols of version 1 and 2."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path, model: str) -> None:
        super().__init__(process, url, log)
        self._model = model

    def takes(self, payload: Payload) -> bool:
        """Whether it is JSON, without an endpoint of its own."""
        return not payload.path and payload.content_type == "application/json"

    def post(self, payload: Payload) -> httpx.Response:
        """Sends a request by version 2 of the protocol if it has this form, otherwise in ``instances``."""
        body, version = payload.body, f"v1/models/{self._model}:predict"
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and isinstance(value.get("inputs"), list):
            version = f"v2/models/{self._model}/infer"
        elif value is not None:
            body = json.dumps({"instances": value if isinstance(value, list) else [value]}).encode()
        return self.http.post(f"{self._url}/{version}", content=body, headers={"content-type": "application/json"})


@contextlib.contextmanager
def torchserve(archive: Path) -> Iterator[Server]:
    """Starts TorchServe."""
    process = TorchServeProcess(archive.parent, properties={"enable_model_api": "true"}, patched=True)
    try:
        process.start()
        process.wait_healthy()
        answer = process.register(archive.name, archive.stem)
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(f"{answer.text}\n{process.log_tail(100)}")
        process.wait_ready(archive.stem)
        yield TorchServe(process, archive.stem)
    finally:
        process.stop()


_RAY = """
import sys, time
import ray
from ray import serve
from torchserve_openvino.hosts.ray import AppArgs, app
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
serve.run(app(AppArgs(archives=[sys.argv[1]], cpus=0.5)), name="models", route_prefix="/")
while True:
    time.sleep(60)
"""


@contextlib.contextmanager
def ray(archive: Path) -> Iterator[Server]:
    """Starts Ray Serve with one replica, on a cluster of this machine."""
    (port,) = free_ports(1)
    with _command("ray", [sys.executable, "-c", _RAY, str(archive), str(port)]) as (process, log):
        address = f"http://{HOST}:{port}"
        server = Command(process, f"{address}/predictions/{archive.stem}", log, "ServeReplica")
        server.wait(f"{address}/models/{archive.stem}")
        yield server


@contextlib.contextmanager
def kserve(archive: Path) -> Iterator[Server]:
    """Starts KServe's predictor."""
    http, grpc = free_ports(2)
    command = [sys.executable, "-m", "torchserve_openvino.hosts.kserve", "--model", str(archive)]
    command += ["--http_port", str(http), "--grpc_port", str(grpc)]
    with _command("kserve", command) as (process, log):
        address = f"http://{HOST}:{http}"
        server = KServe(process, address, log, archive.stem)
        server.wait(f"{address}/v2/models/{archive.stem}/ready")
        yield server


@contextlib.contextmanager
def serve(archive: Path) -> Iterator[Server]:
    """Starts `serve` with one worker."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "torchserve_openvino.cli", "serve", str(archive), "--port", str(port)]
    with _command("uvicorn", [*command, "--workers", "1"], "serve") as (process, log):
        address = f"http://{HOST}:{port}"
        server = Command(process, f"{address}/predictions/{archive.stem}", log, "hosts.serve.worker")
        server.wait(f"{address}/ping")
        yield server


@contextlib.contextmanager
def _command(package: str, command: list[str], extra: str = "") -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    if importlib.util.find_spec(package) is None:
        raise HostMissingError(f"{package} is not installed: pip install 'torchserve-openvino[{extra or package}]'")
    folder = Path(tempfile.mkdtemp(prefix="tsov-"))
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=os.environ)
    try:
        yield process, log
    finally:
        stop_group(process.pid)
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


HOSTS = {"torchserve": torchserve, "serve": serve, "ray": ray, "kserve": kserve}
