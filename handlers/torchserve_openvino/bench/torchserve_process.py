"""One real TorchServe that belongs to whoever started it: its own ports, folders, pid file and process group.

Nothing here looks for, stops or shares a TorchServe that was started elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from torchserve_openvino.bench.ports import HOST, free_ports
from torchserve_openvino.bench.processes import STOP_SECONDS, signals_later, stop_group
from torchserve_openvino.errors import TorchServeOpenVINOError
from torchserve_openvino.frontend import Frontend

_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel, and in a source tree.
METRICS_YAML = next(
    (path for path in (_PACKAGE / "templates", _PACKAGE.parents[1] / "model-config") if path.is_dir()), _PACKAGE
).joinpath("metrics.yaml")
LOG_FILES = ("console.log", "model_log.log")
# Left out of the console's tail: lines that model_log.log has too, and the access line of each poll.
NOISE = re.compile(r"ACCESS_LOG|TS_METRICS|MODEL_METRICS|MODEL_LOG|\[METRICS\]|\[DEBUG\]|[Bb]ackend response|jobId")


class TorchServeError(TorchServeOpenVINOError, RuntimeError):
    """TorchServe did not start, or a model did not become ready; the message carries the end of its log."""


@dataclass(frozen=True)
class Ports:
    """The five ports that one TorchServe opens."""

    inference: int
    management: int
    metrics: int
    grpc_inference: int
    grpc_management: int

    @classmethod
    def free(cls) -> Ports:
        """Returns five ports that are free at this moment."""
        return cls(*free_ports(5))

    @classmethod
    def rest(cls, inference: int, management: int, metrics: int) -> Ports:
        """These for HTTP, and any two free ones for gRPC."""
        return cls(inference, management, metrics, *free_ports(2))


@dataclass
class TorchServeProcess:
    """Starts, watches and stops one TorchServe.

    Args:
        model_store: Folder of the .mar files.
        ports: Defaults to free ones.
        models: name -> archive, loaded at the start. Others come through `register`.
        properties: Further lines of config.properties; they override the defaults.
        environment: Further environment variables of the server and its workers.
        patched: Whether its Java frontend is patched (`torchserve-openvino frontend`): a copy of it, unless the one
            installed is.
        home: Folder for logs, temporary files and the configuration; by default a new one with a short path, since it
            holds the workers' Unix sockets, whose paths are limited to about 100 characters.
    """

    model_store: Path
    ports: Ports = field(default_factory=Ports.free)
    models: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    patched: bool = False
    home: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="tsov-")))
    group: int | None = None
    # Ignores the environment's proxies, which don't reach this machine's loopback.
    http: httpx.Client = field(default_factory=lambda: httpx.Client(trust_env=False, timeout=60))
    _process: subprocess.Popen[bytes] | None = None

    @property
    def logs(self) -> Path:
        """Folder of its logs."""
        return self.home / "logs"

    @property
    def inference_url(self) -> str:
        """Address of the inference API."""
        return f"http://{HOST}:{self.ports.inference}"

    @property
    def management_url(self) -> str:
        """Address of the management API."""
        return f"http://{HOST}:{self.ports.management}"

    @property
    def metrics_url(self) -> str:
        """Address of its metrics."""
        return f"http://{HOST}:{self.ports.metrics}/metrics"

    @property
    def alive(self) -> bool:
        """Whether it was started and has not exited."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the server as the leader of a new process group and returns at once."""
        temporary = self.home / "tmp"
        for folder in (self.logs, temporary):
            folder.mkdir(parents=True, exist_ok=True)
        configuration = self.home / "config.properties"
        configuration.write_text("".join(f"{key}={value}\n" for key, value in self._properties().items()))
        command = [sys.executable, "-m", "ts.model_server", "--start", "--foreground", "--ncs"]
        command += ["--ts-config", str(configuration), "--model-store", str(self.model_store)]
        if self.models:
            command += ["--models", *(f"{name}={archive}" for name, archive in self.models.items())]
        # An interrupt between start and `group` would leave a server of which nobody knows.
        with signals_later(), (self.logs / "console.log").open("wb") as console:
            self._process = subprocess.Popen(
                command,
                cwd=self.home,
                env=self._environment(temporary),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.group = self._process.pid

    def _properties(self) -> dict[str, str]:
        own = {
            "inference_address": f"http://{HOST}:{self.ports.inference}",
            "management_address": f"http://{HOST}:{self.ports.management}",
            "metrics_address": f"http://{HOST}:{self.ports.metrics}",
            "grpc_inference_address": HOST,
            "grpc_management_address": HOST,
            "grpc_inference_port": str(self.ports.grpc_inference),
            "grpc_management_port": str(self.ports.grpc_management),
            "disable_token_authorization": "true",
            "enable_envvars_config": "false",
            "install_py_dep_per_model": "false",
            "default_workers_per_model": "1",
            "metrics_mode": "prometheus",
        }
        if METRICS_YAML.exists():
            own["metrics_config"] = str(METRICS_YAML)
        return own | dict(self.properties)

    def _environment(self, temporary: Path) -> dict[str, str]:
        # The pid file goes to TMPDIR; the workers' sockets and the unpacked models to TEMP (Java's tmpdir).
        own = {
            "TMPDIR": str(temporary),
            "TEMP": str(temporary),
            "LOG_LOCATION": str(self.logs),
            "METRICS_LOCATION": str(self.logs),
            # Workers are started as `python` by some launchers: the right one must come first.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        }
        inherited = {key: value for key, value in os.environ.items() if key != "TS_CONFIG_FILE"}
        variables = inherited | own | dict(self.environment)
        if self.patched and (package := patched_package(self.home)) is not None:
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), variables.get("PYTHONPATH")]))
        return variables

    def wait_healthy(self, timeout: float = 60.0, tick: Callable[[], None] = lambda: None) -> None:
        """Waits until /ping answers Healthy: the server is up, its models may not be."""
        self._wait(self._is_healthy, "TorchServe did not come up", timeout, tick)

    def wait_ready(self, model: str, timeout: float = 300.0, tick: Callable[[], None] = lambda: None) -> None:
        """Waits until every worker of `model` is READY; /ping is Healthy before that.

        Raises:
            TorchServeError: A worker died, the server exited, or the timeout passed.
        """
        self._wait(lambda: self._is_ready(model), f"{model} did not become READY", timeout, tick)

    def _wait(self, done: Callable[[], bool], what: str, timeout: float, tick: Callable[[], None]) -> None:
        end = time.monotonic() + timeout
        while not done():
            if self._process is not None and self._process.poll() is not None:
                raise TorchServeError(f"{what}: TorchServe exited with {self._process.returncode}\n{self.log_tail()}")
            if time.monotonic() > end:
                raise TorchServeError(f"{what} in {timeout:.0f} s\n{self.log_tail()}")
            tick()
            time.sleep(0.2)

    def _is_healthy(self) -> bool:
        try:
            return bool(self.http.get(f"{self.inference_url}/ping", timeout=5).status_code == httpx.codes.OK)
        except httpx.TransportError:
            return False

    def _is_ready(self, model: str) -> bool:
        try:
            workers = self.workers(model)
        except httpx.HTTPError:
            return False
        if self.load_failures(model):
            raise TorchServeError(f"{model} failed to load\n{self.log_tail()}")
        return bool(workers) and all(worker["status"] == "READY" for worker in workers)

    def workers(self, model: str) -> list[dict[str, Any]]:
        """TorchServe's view of the workers of `model`, each with its `pid` and `status`."""
        answer = self.http.get(f"{self.management_url}/models/{model}", timeout=10)
        answer.raise_for_status()
        return list(answer.json()[0]["workers"])

    def wait_replaced(self, model: str, pid: int, timeout: float = 60.0) -> None:
        """Waits until the only worker of `model` is READY, and another one than `pid`, which was killed.

        Raises:
            TorchServeError: The server exited, or the timeout passed.
        """

        def is_replaced() -> bool:
            (worker,) = self.workers(model)
            return worker["status"] == "READY" and worker["pid"] != pid

        self._wait(is_replaced, f"{model} got no other worker than {pid}", timeout, lambda: None)

    def load_failures(self, model: str) -> int:
        """How many workers of `model` have died; TorchServe restarts them silently."""
        died = re.compile(rf"W-\d+-{re.escape(model)}_\S+-stdout MODEL_LOG - Backend worker process died")
        return len(died.findall(self.log("model_log.log")))

    def register(self, archive: str, model: str, **parameters: str | int) -> httpx.Response:
        """Registers an archive of the model store; the answer comes when a worker is READY or has failed."""
        values = {"url": archive, "model_name": model, "initial_workers": 1, **parameters}
        return self.http.post(f"{self.management_url}/models", params=values, timeout=180)

    def describe(self, model: str) -> dict[str, Any]:
        """The worker's own description: `GET /models/NAME?customized=true`."""
        url = f"{self.management_url}/models/{model}"
        answer = self.http.get(url, params={"customized": "true"})
        answer.raise_for_status()
        metadata = answer.json()[0]["customizedMetadata"]
        return json.loads(metadata) if isinstance(metadata, str) else dict(metadata)

    def predict(self, model: str, content: bytes, content_type: str = "application/octet-stream") -> httpx.Response:
        """Sends one request and returns the response."""
        url = f"{self.inference_url}/predictions/{model}"
        return self.http.post(url, content=content, headers={"content-type": content_type}, timeout=120)

    def log(self, name: str) -> str:
        """Returns the content of one log file; empty if there is none."""
        path = self.logs / name
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the logs that say why something failed."""
        tails = []
        for name in LOG_FILES:
            text = self.log(name).splitlines()
            if name == "console.log":
                text = [line for line in text if not NOISE.search(line)]
            text = text[-lines:]
            if text:
                tails.append(f"--- {self.logs / name}\n" + "\n".join(text))
        return "\n".join(tails)

    def stop(self) -> None:
        """Ends the server and its workers, waits until they are gone, and removes its folder.

        Ctrl-C meanwhile takes effect afterwards, so that nothing is left behind.
        """
        with signals_later():
            self.http.close()
            if self.group is not None:
                stop_group(self.group)
                self.group = None
            if self._process is not None:
                self._process.wait(timeout=STOP_SECONDS)
            shutil.rmtree(self.home, ignore_errors=True)

    def record(self) -> dict[str, Any]:
        """What `stop_recorded` needs to end this server later, from another process."""
        group = self.group
        if group is None:
            raise TorchServeError("The server is not running")
        started = psutil.Process(group).create_time()
        return {"group": group, "started": started, "home": str(self.home), "ports": asdict(self.ports)}

    def __enter__(self) -> TorchServeProcess:
        try:
            self.start()
            self.wait_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def patched_package(home: Path) -> Path | None:
    """A folder with a copy of TorchServe whose frontend is patched; None if the installed one is."""
    installed = Frontend.installed()
    if installed.state == "patched":
        return None
    package = installed.path.parents[1]
    copied = home / "patched" / package.name
    shutil.copytree(package, copied, ignore=shutil.ignore_patterns("__pycache__"))
    Frontend(copied / installed.path.relative_to(package)).patch()
    return copied.parent
