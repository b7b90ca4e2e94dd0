"""Compares `torchserve-openvino serve` with TorchServe: the same archive, one after the other, in several rounds.

    python scripts/benchmarks/serve.py model-store/efficientnet-lite0.mar --body photo.jpg
    python scripts/benchmarks/serve.py net.mar --body row.json --content-type application/json --rounds 5 --seconds 20

Each round starts both servers anew, in alternating order, so that a machine that gets slower hits both. Columns: the
median and the 95th percentile at one client, requests/s at 16 clients, and the memory of all processes (each shared
page counted once, where the system shows it).
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import psutil
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from serve_server import ServeServer
from server import Ports, TorchServeProcess, group_members

from benchmarks import output
from torchserve_openvino.hosts.model_settings import ModelSettings

KINDS = ("TorchServe", "serve")
_CLIENTS = 16
# Requests before anything is counted.
_WARM_SECONDS = 1.0


@contextmanager
def _running(kind: str, archive: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """Yields the URL of the model and the group of its processes."""
    name = ModelSettings.of(archive).name
    server: ServeServer | TorchServeProcess
    if kind == "serve":
        server = ServeServer(archive, Ports.free().inference, folder)
    else:
        shutil.copyfile(archive, folder / archive.name)
        server = TorchServeProcess(folder, models={name: archive.name})
    try:
        server.start()
        server.wait_healthy()
        server.wait_ready(name)
        assert server.group is not None
        yield f"{server.inference_url}/predictions/{name}", server.group
    finally:
        server.stop()


async def _load(url: str, body: bytes, content_type: str, clients: int, seconds: float) -> list[float]:
    """Returns the seconds that each answered request took; clients send one after another."""
    took: list[float] = []

    async def client(session: aiohttp.ClientSession, start: float) -> None:
        while (begun := time.perf_counter()) < start + seconds + _WARM_SECONDS:
            async with session.post(url, data=body, headers={"content-type": content_type}) as answer:
                content = await answer.read()
                if answer.status != 200:
                    raise typer.BadParameter(f"status {answer.status}: {content[:300]!r}", param_hint="--body")
            if begun > start + _WARM_SECONDS:
                took.append(time.perf_counter() - begun)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as session:
        start = time.perf_counter()
        await asyncio.gather(*(client(session, start) for _ in range(clients)))
    return took


def _memory(group: int) -> int:
    """Returns the bytes of all processes of a group."""
    total = 0
    # Workers of `serve` have groups of their own.
    members = {member.pid: member for root in group_members(group) for member in (root, *root.children(recursive=True))}
    for process in members.values():
        try:
            full = process.memory_full_info()
            total += getattr(full, "pss", full.uss)
        except psutil.Error:
            continue
    return total


def _measure(kind: str, archive: Path, body: bytes, content_type: str, seconds: float) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="tsov-serve-") as folder,
        _running(kind, archive, Path(folder)) as (url, group),
    ):
        alone = sorted(asyncio.run(_load(url, body, content_type, 1, seconds)))
        together = asyncio.run(_load(url, body, content_type, _CLIENTS, seconds))
        return {
            "kind": kind,
            "p50_ms": statistics.median(alone) * 1e3,
            "p95_ms": alone[int(0.95 * (len(alone) - 1))] * 1e3,
            "per_second": len(together) / seconds,
            "memory_mb": _memory(group) / 1e6,
        }


def main(
    archive: Annotated[Path, typer.Argument(help="A .mar.", exists=True, dir_okay=False)],
    body: Annotated[Path, typer.Option(help="File with the body of each request.", exists=True, dir_okay=False)],
    content_type: Annotated[str, typer.Option(help="Type of the body.")] = "application/octet-stream",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(min=0.5, help="Of each measurement.")] = 10.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Compares `serve` with TorchServe."""
    figures = []
    for number in range(rounds):
        for kind in KINDS if number % 2 == 0 else reversed(KINDS):
            figures.append(_measure(kind, archive, body.read_bytes(), content_type, seconds))
            print(f"round {number + 1}: {figures[-1]}", file=sys.stderr)
    print(f"| server | p50 ms, 1 client | p95 ms, 1 client | requests/s, {_CLIENTS} clients | MB of all processes |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for kind in KINDS:
        own = [figure for figure in figures if figure["kind"] == kind]
        middle = {key: statistics.median(round_[key] for round_ in own) for key in own[0] if key != "kind"}
        print(
            f"| {kind} | {middle['p50_ms']:.1f} | {middle['p95_ms']:.1f} | {middle['per_second']:.0f} | "
            f"{middle['memory_mb']:.0f} |"
        )
    if json_path is not None:
        output.write_json(json_path, {"figures": figures})


if __name__ == "__main__":
    typer.run(main)
