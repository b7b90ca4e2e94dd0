"""Counts the requests that TorchServe's frontend loses with asyncCommunication, as it comes and mended.

    python scripts/benchmarks/frontend.py
    python scripts/benchmarks/frontend.py --servers 24 --requests 4000 --only mended
    python scripts/benchmarks/frontend.py --servers 5 --kills 3

A handler without a model answers within milliseconds, so that there are many requests. Each server is a new one, since
the fault shows most often before Java has compiled the code. With --kills, workers are killed meanwhile: what they had
in work may fail, but must be told so.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from server import TorchServeProcess

from benchmarks import output

_HANDLER = Path(__file__).parent / "servers" / "awaited_handler.py"
_CONFIG = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 1\nasyncCommunication: true\nmaxRetryTimeoutInSec: 60\n"
_CLIENTS = 8
# Nothing that is answered takes longer.
_LOST_SECONDS = 10.0
_LIFE_SECONDS = 4.0
KINDS = ("as it comes", "patched")


def _packed(folder: Path) -> None:
    config = folder / "model-config.yaml"
    config.write_text(_CONFIG, encoding="utf-8")
    command: list[Any] = [
        sys.executable, "-m", "model_archiver.model_packaging", "--model-name", "awaited", "--version", "1.0",
        "--handler", _HANDLER, "--export-path", folder, "--config-file", config,
    ]  # fmt: skip
    subprocess.run(command, check=True)


def _kill_workers(server: TorchServeProcess, kills: int, over: threading.Event) -> None:
    for _ in range(kills):
        if over.wait(_LIFE_SECONDS):
            return
        (worker,) = server.workers("awaited")
        if worker["status"] == "READY":
            os.kill(worker["pid"], signal.SIGKILL)


def _asked(server: TorchServeProcess, requests: int) -> Counter[str]:
    """How requests of several clients ended; a client whose request was lost sends no more."""
    numbers = itertools.count()

    def client(_: int) -> Counter[str]:
        ends = Counter[str]()
        url = f"{server.inference_url}/predictions/awaited"
        with httpx.Client(timeout=_LOST_SECONDS, trust_env=False) as http:
            while next(numbers) < requests and not ends["lost"]:
                try:
                    ends[str(http.post(url, content=b"x").status_code)] += 1
                except httpx.TimeoutException:
                    ends["lost"] += 1
                except httpx.HTTPError:
                    ends["broken"] += 1
        return ends

    with ThreadPoolExecutor(_CLIENTS) as pool:
        return sum(pool.map(client, range(_CLIENTS)), Counter[str]())


def _one_server(store: Path, kind: str, requests: int, kills: int) -> Counter[str]:
    properties, over = {"job_queue_size": "2000"}, threading.Event()
    models = {"awaited": "awaited.mar"}
    with TorchServeProcess(store, models=models, properties=properties, patched=kind == "patched") as server:
        server.wait_ready("awaited")
        killer = threading.Thread(target=_kill_workers, args=(server, kills, over))
        killer.start()
        ends = _asked(server, requests)
        over.set()
        killer.join()
    return ends


def main(
    servers: Annotated[int, typer.Option(help="Of each kind, one after the other.", min=1)] = 12,
    requests: Annotated[int, typer.Option(help="For each server.", min=1)] = 4000,
    kills: Annotated[int, typer.Option(help="Workers that are killed in each server.", min=0)] = 0,
    only: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(KINDS)}")] = ",".join(KINDS),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Counts the requests that TorchServe's frontend loses."""
    kinds = output.chosen(only, KINDS, "--only")
    ends: dict[str, list[Counter[str]]] = {kind: [] for kind in kinds}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tsov-bench-") as folder:
        _packed(Path(folder))
        for turn, kind in itertools.product(range(servers), kinds):
            ends[kind].append(_one_server(Path(folder), kind, requests, kills))
            output.progress.print(f"{kind}, server {turn + 1} of {servers}: {dict(ends[kind][-1])}")
    totals = {kind: sum(counts, Counter[str]()) for kind, counts in ends.items()}
    lost = {kind: sum(one["lost"] > 0 for one in counts) for kind, counts in ends.items()}
    results = {kind: {"requests": n.total(), "servers_that_lost": lost[kind], **n} for kind, n in totals.items()}
    rows = [(kind, *map(str, (n.total(), n["200"], n["lost"], lost[kind]))) for kind, n in totals.items()]
    output.results().print(
        output.table("frontend", ["frontend", "requests", "200", "lost", "servers that lost"], rows, left=1)
    )
    output.write_json(json_path, {"kills": kills, "seconds": time.perf_counter() - began, **results})


if __name__ == "__main__":
    typer.run(main)
