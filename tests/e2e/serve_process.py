"""A real `torchserve-openvino serve` for tests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from torchserve_process import handler_path

from network import CONFIG, NETWORK
from torchserve_openvino.packaging.archive import run_archiver

READY_SECONDS = 120


class ServeProcess:
    """The command, and the lines of JSON that it prints."""

    def __init__(self, archives: Sequence[Path], folder: Path, *options: str) -> None:
        self.log = folder / "serve.log"
        command = [
            sys.executable,
            "-m",
            "torchserve_openvino.cli",
            "serve",
            *map(str, archives),
            "--json",
            "--port",
            "0",
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=log, cwd=folder)
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self.http = httpx.Client(timeout=60, trust_env=False)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self.events.append({"event": "end", "text": ""})
            self._changed.notify_all()

    def wait_for(self, event: str, text: str = "", after: int = 0) -> dict[str, Any]:
        """Returns the first event of a kind whose text contains some words."""

        def seen() -> dict[str, Any] | None:
            some = [e for e in self.events[after:] if e["event"] in (event, "end") and (text in e["text"])]
            return some[0] if some else None

        with self._changed:
            assert self._changed.wait_for(
                lambda: seen() or self.events[-1:] == [{"event": "end", "text": ""}], READY_SECONDS
            )
            event_seen = seen()
        assert event_seen is not None and event_seen["event"] == event, f"{self.events}\n{self.log.read_text()[-3000:]}"
        return event_seen

    def until(self, condition: Any, seconds: float = 60) -> None:
        """Waits until a condition holds."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"{self.events}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.05)

    @property
    def url(self) -> str:
        return str(self.wait_for("ready")["url"])

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(f"{self.url}{path}", json=json, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(f"{self.url}{path}", **options)

    def model(self, name: str) -> dict[str, Any]:
        return dict(self.get(f"/models/{name}").json()[0])

    def pids(self, name: str) -> list[int]:
        return [each["pid"] for each in self.model(name)["workers"] if each["status"] == "READY"]

    def stop(self) -> int:
        """Ends it as Docker does; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self._reading.join(10)
            self.http.close()


@contextmanager
def serving(archives: Sequence[Path], folder: Path, *options: str) -> Iterator[ServeProcess]:
    """A server that is ready."""
    server = ServeProcess(archives, folder, *options)
    try:
        server.wait_for("ready")
        yield server
    finally:
        server.stop()


def pack(
    folder: Path,
    name: str,
    weights: Path,
    config: str = CONFIG,
    version: str = "1.0",
    handler: str | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Packs the small network, with a handler of this package or the source of another one."""
    folder.mkdir(exist_ok=True)
    for file, text in {f"{name}_network.py": NETWORK, f"{name}.yaml": config, **(files or {})}.items():
        (folder / file).write_text(text)
    path = handler_path("tensor")
    if handler is not None:
        path = str(folder / f"{name}_handler.py")
        Path(path).write_text(handler)
    arguments = ["--version", version, "--model-file", str(folder / f"{name}_network.py"), "--handler", path]
    arguments += ["--serialized-file", str(weights), "--config-file", str(folder / f"{name}.yaml")]
    return run_archiver(arguments, name, folder)
