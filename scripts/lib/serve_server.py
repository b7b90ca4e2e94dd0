"""`torchserve-openvino serve` for scripts, with the members of `TorchServeProcess` that they use."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from server import TorchServeError

_END_SECONDS = 40.0


class ServeServer:
    """A server of one archive on 127.0.0.1.

    Args:
        archive: The .mar.
        port: Its port.
        folder: Where its log goes.
        options: More options of the command.
    """

    def __init__(self, archive: Path, port: int, folder: Path, *options: str) -> None:
        self._archive, self._port, self._options = archive, port, options
        self.logs = folder / "logs"
        self.process: subprocess.Popen[bytes] | None = None
        self.inference_url = self.management_url = f"http://127.0.0.1:{port}"
        self.metrics_url = f"{self.inference_url}/metrics"
        self.http = httpx.Client(timeout=120, trust_env=False)

    @property
    def group(self) -> int | None:
        """The group of its processes; None before it was started."""
        return self.process.pid if self.process is not None else None

    def start(self) -> None:
        """Starts it."""
        self.logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "torchserve_openvino.cli", "serve", str(self._archive)]
        with (self.logs / "serve.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self._port), *self._options], stdout=log, stderr=log, start_new_session=True
            )

    def wait_healthy(self, timeout: float = 60.0, tick: Callable[[], None] = lambda: None) -> None:
        """Does nothing: it is healthy once its model is ready."""

    def wait_ready(self, model: str, timeout: float = 300.0, tick: Callable[[], None] = lambda: None) -> None:
        """Waits until a model answers.

        Raises:
            TorchServeError: It ended, or takes too long.
        """
        until = time.monotonic() + timeout
        while True:
            try:
                if self.http.get(f"{self.inference_url}/v2/models/{model}/ready").is_success:
                    return
            except httpx.TransportError:
                pass
            if self.process is None or self.process.poll() is not None or time.monotonic() > until:
                raise TorchServeError(f"`serve` does not answer:\n{self.log_tail()}")
            tick()
            time.sleep(0.2)

    def predict(self, model: str, content: bytes, content_type: str = "application/octet-stream") -> httpx.Response:
        """Sends a request."""
        url = f"{self.inference_url}/predictions/{model}"
        return self.http.post(url, content=content, headers={"content-type": content_type})

    def log_tail(self, lines: int = 40) -> str:
        """Returns the end of its log."""
        path = self.logs / "serve.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.is_file() else ""

    def record(self) -> dict[str, Any]:
        """Returns what `server.stop_recorded` needs to end it later, from another process."""
        if self.process is None:
            raise TorchServeError("The server is not running")
        started = psutil.Process(self.process.pid).create_time()
        return {"group": self.process.pid, "started": started, "home": "", "ports": {}}

    def stop(self) -> None:
        """Ends it, and its workers with it."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.http.close()
