"""Times a new replica on Ray Serve with its graphs in the archive until it is READY.

Two times: from the start of its process, and from the death of its predecessor, which Ray notices at its next check.
EfficientNet-Lite0 with three compiled batch sizes; two replicas, one of which is killed, several times. Needs the
extras `examples` and `ray`, and as many cores as two replicas have.

    python scripts/benchmarks/ray_replica.py
    python scripts/benchmarks/ray_replica.py --rounds 5 --json replica.json
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import psutil
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from build_efficientnet_mar import archiver_command

HERE = Path(__file__).resolve().parent
NAME = "replica"
_PATIENCE_SECONDS = 120
app = typer.Typer(add_completion=False, rich_markup_mode=None)


def precompiled(folder: Path) -> Path:
    """Packs the model with its graphs; returns the archive."""
    options = archiver_command(folder, NAME, HERE / "servers" / "ours.yaml")[1:]
    command = [sys.executable, "-m", "torchserve_openvino.cli", "package", *options, "--precompile"]
    with output.progress.status("compiling into the archive"):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"package failed:\n{done.stdout}{done.stderr}")
    return folder / f"{NAME}.mar"


class Deployed:
    """The application on a Ray of its own."""

    def __init__(self, archive: Path, cpus: float) -> None:
        import ray
        from ray import serve

        from torchserve_openvino.bench.ports import HOST, free_ports

        self._archive, self._cpus = str(archive), cpus
        (port,) = free_ports(1)
        self._url = f"http://{HOST}:{port}/models/{NAME}/replicas"
        ray.init(address="local", log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        serve.start(http_options={"host": HOST, "port": port})

    def start(self) -> None:
        """Deploys two replicas."""
        from ray import serve

        from torchserve_openvino.hosts.ray import AppArgs
        from torchserve_openvino.hosts.ray import app as build

        args = AppArgs(archives=[self._archive], cpus=self._cpus, replicas=2)
        serve.run(build(args), name=NAME, route_prefix="/")

    def reports(self) -> dict[str, dict[str, Any]]:
        """Returns the report of each replica that is READY."""
        answer = httpx.get(self._url, trust_env=False, timeout=60)
        return (
            {replica["replica"]: replica for replica in answer.json()} if answer.status_code == httpx.codes.OK else {}
        )

    def replace(self) -> tuple[float, float, dict[str, Any]]:
        """Kills a replica; returns the seconds from its end and from its successor's start to READY, and the report."""
        before = self.reports()
        os.kill(next(iter(before.values()))["pid"], signal.SIGKILL)
        start = time.perf_counter()
        while not (new := set(now := self.reports()) - set(before)):
            if time.perf_counter() - start > _PATIENCE_SECONDS:
                raise RuntimeError(f"no new replica after {_PATIENCE_SECONDS} s")
            time.sleep(0.05)
        seconds, report = time.perf_counter() - start, now[new.pop()]
        return seconds, time.time() - psutil.Process(report["pid"]).create_time(), report

    def stop(self) -> None:
        """Ends Ray."""
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()


@app.command(help="\b\n" + (__doc__ or "").replace("\n\n", "\n\n\b\n"))
def main(
    rounds: Annotated[int, typer.Option(min=1, help="How often a replica is replaced")] = 3,
    cpus: Annotated[float, typer.Option(min=0.1, help="CPUs of each replica")] = 1.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
) -> None:
    starts = []
    with tempfile.TemporaryDirectory(prefix="tsov-replica-") as folder:
        archive = precompiled(Path(folder))
        deployed = Deployed(archive, cpus)
        try:
            with output.progress.status("starting two replicas"):
                deployed.start()
            for number in range(rounds):
                with output.progress.status(f"round {number + 1} of {rounds}"):
                    since_end, since_start, report = deployed.replace()
                if not report["verify"]["passed"]:
                    raise RuntimeError("the replica's answers differ from eager PyTorch's")
                counts = {name: report["cache"][name] for name in ("traces", "compiles", "imports")}
                starts.append({"since_start": round(since_start, 2), "since_end": round(since_end, 2), **counts})
        finally:
            deployed.stop()
    columns = ("round", "READY after its start, s", "after the other's end, s", "traces", "compiles", "imports")
    rows = [(str(number + 1), *map(str, start.values())) for number, start in enumerate(starts)]
    output.results().print(output.table(f"a new replica of {cpus:g} CPUs", columns, rows))
    middle = median(start["since_start"] for start in starts)
    output.results().print(f"READY after {middle:.1f} s (median)")
    output.write_json(json_path, {"rounds": starts, "median_seconds": middle})


if __name__ == "__main__":
    app()
