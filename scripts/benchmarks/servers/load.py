"""One measurement: the client in its own process, and the server's processor time meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.servers import usage
from benchmarks.servers.client import Order
from benchmarks.servers.photos import Photo

SCRIPTS = Path(__file__).resolve().parents[2]
CLIENT = [sys.executable, "-m", "benchmarks.servers.client"]


@dataclass(frozen=True)
class Load:
    """How much is sent: `closed` clients or `open` requests a second."""

    kind: str
    level: float

    def __str__(self) -> str:
        return f"closed, {self.level:.0f} clients" if self.kind == "closed" else f"open, {self.level:.1f}/s"


def save(photos: Sequence[Photo], folder: Path) -> list[tuple[str, str]]:
    """Writes the files that the client reads; returns their paths with the labels."""
    result = []
    for photo in photos:
        path = folder / f"{photo.name}.jpg"
        path.write_bytes(photo.data)
        result.append((str(path), photo.label))
    return result


def measure(order: Order, root: int) -> dict[str, Any]:
    """Sends, and returns the client's figures with the server's `cpu_ms` per request.

    `other_cores` is how many cores other processes used: where it is far from 0, the throughput is unreliable.

    Args:
        order: What to send.
        root: The server's topmost process.
    """
    client = subprocess.Popen(CLIENT, cwd=SCRIPTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        if client.stdin is None or client.stdout is None:
            raise RuntimeError("the client has no pipes")
        client.stdin.write(json.dumps(asdict(order)) + "\n")
        client.stdin.flush()
        _line(client.stdout.readline())
        before, machine, start = usage.cpu_seconds(root), usage.busy_seconds(), time.monotonic()
        client.stdin.write("go\n")
        client.stdin.flush()
        figures: dict[str, Any] = json.loads(_line(client.stdout.readline()))
        used = usage.cpu_seconds(root) - before
        others = usage.busy_seconds() - machine - used - figures["client_cpu_seconds"]
        figures["other_cores"] = max(0.0, others) / (time.monotonic() - start)
    finally:
        client.kill()
        client.wait()
        for pipe in (client.stdin, client.stdout):
            if pipe is not None:
                pipe.close()
    figures["cpu_ms"] = used * 1e3 / figures["answered"] if figures["answered"] else None
    figures["client_cpu_ms"] = figures["client_cpu_seconds"] * 1e3 / max(1, figures["answered"])
    return figures


def _line(text: str) -> str:
    if not text:
        raise RuntimeError("the load client ended without an answer; its message is above")
    return text


def warm_up(order: Order, seconds: float, levels: Sequence[float], root: int) -> None:
    """Sends uncounted load at each level, to warm up connections, caches and all batch sizes."""
    for level in levels:
        measure(replace(order, kind="closed", level=level, seconds=seconds, settle=0.0), root)
