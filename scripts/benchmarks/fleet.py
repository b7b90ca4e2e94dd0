"""Simulates a fleet of workers that start on one cache, from the start of a single worker, measured here.

It measures two starts of `ArchiveService` in processes of their own: with an empty cache (compiles and stores), and
with that one (reads). Then it simulates: workers come up at a rate; the first compiles under the cache's lock, the
others look at the lock every 50 ms and then read, over storage whose bandwidth they share. Needs the extra
`examples`, and simpy.

    python scripts/benchmarks/fleet.py
    python scripts/benchmarks/fleet.py --workers 1000 --per-second 50 --bandwidth 1.25 --json fleet.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import simpy
import typer
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from build_efficientnet_mar import archiver_command, run_archiver

HERE = Path(__file__).resolve().parent
NAME = "fleet"
# How often a worker looks at the lock, as filelock does.
_POLL_SECONDS = 0.05
_HOST = """
import json, sys, time
start = time.perf_counter()
from pathlib import Path
from torchserve_openvino.hosts.archive_service import ArchiveService
service = ArchiveService(Path(sys.argv[1]), lambda *_: None)
seconds = time.perf_counter() - start
report = service.describe()
cache = report["cache"]
print(json.dumps({"seconds": seconds, "verified": report["verify"]["passed"],
                  **{name: cache[name] for name in ("traces", "compiles", "imports")}}))
"""
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True)
class Start:
    """One measured start.

    Attributes:
        seconds: From the process's first line to READY.
        read: Bytes that it reads from the cache.
    """

    seconds: float
    traces: int
    compiles: int
    imports: int
    read: int = 0


def measured(folder: Path) -> dict[str, Start]:
    """Starts a worker in both ways, one after the other."""
    config = yaml.safe_load((HERE / "servers" / "ours.yaml").read_text(encoding="utf-8"))
    cache = folder / "cache"
    config["pt2"]["compile"]["options"] |= {"model_caching": True, "cache_dir": str(cache)}
    (folder / "cached.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run_archiver(archiver_command(folder, NAME, folder / "cached.yaml"))
    archive = folder / f"{NAME}.mar"
    figures = {}
    for name in ("cold", "warm"):
        with output.progress.status(f"a worker with a {name} cache"):
            figures[name] = _started(archive)
    read = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    figures["warm"] = Start(**{**vars(figures["warm"]), "read": read})
    return figures


def _started(archive: Path) -> Start:
    done = subprocess.run([sys.executable, "-c", _HOST, archive], check=True, capture_output=True, text=True)
    facts = json.loads(done.stdout.splitlines()[-1])
    if not facts.pop("verified"):
        raise RuntimeError("the worker's answers differ from eager PyTorch's")
    return Start(**facts)


@dataclass
class Fleet:
    """What happened in a simulation.

    Attributes:
        ready: Seconds at which each worker was READY.
        compiles: Workers that compiled.
        read: Bytes read from the cache.
    """

    ready: list[float]
    compiles: int = 0
    read: int = 0


def simulate(cold: Start, warm: Start, workers: int, per_second: float, bandwidth: float, readers: int) -> Fleet:
    """Simulates the start of a fleet.

    Args:
        cold: A worker that compiles.
        warm: A worker that reads.
        workers: How many start.
        per_second: How many come up in a second (the scheduler's rate).
        bandwidth: Of the shared storage, bytes per second.
        readers: Reads at once; more wait.
    """
    environment, fleet = simpy.Environment(), Fleet([])
    lock, storage = simpy.Resource(environment), simpy.Resource(environment, readers)
    stored = environment.event()
    # What both do: import, load, verify; the rest of the cold start is under the lock.
    common = max(warm.seconds - warm.read / bandwidth, 0.0)

    def worker(number: int) -> Iterator[Any]:
        yield environment.timeout(number / per_second)
        yield environment.timeout(common)
        if not stored.triggered:
            with lock.request() as held:
                yield held | stored
                if not stored.triggered:
                    yield environment.timeout(cold.seconds - common)
                    fleet.compiles += 1
                    stored.succeed()
                    fleet.ready.append(environment.now)
                    return
            yield environment.timeout(_POLL_SECONDS)
        with storage.request() as turn:
            yield turn
            # Those who read at once share the bandwidth.
            yield environment.timeout(warm.read * storage.count / bandwidth)
        fleet.read += warm.read
        fleet.ready.append(environment.now)

    for number in range(workers):
        environment.process(worker(number))
    environment.run()
    return fleet


@app.command(help="\b\n" + (__doc__ or "").replace("\n\n", "\n\n\b\n"))
def main(
    workers: Annotated[int, typer.Option(min=1, help="Workers that start")] = 1000,
    per_second: Annotated[float, typer.Option(min=0.1, help="Of them come up in a second")] = 100.0,
    bandwidth: Annotated[float, typer.Option(min=0.01, help="Of the shared storage, GB/s")] = 1.25,
    readers: Annotated[int, typer.Option(min=1, help="Reads that share it at once")] = 64,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
) -> None:
    with tempfile.TemporaryDirectory(prefix="tsov-fleet-") as folder:
        starts = measured(Path(folder))
    columns = ("worker", "seconds to READY", "traces", "compiles", "imports", "MB read")
    rows = [
        (name, f"{one.seconds:.1f}", str(one.traces), str(one.compiles), str(one.imports), f"{one.read / 1e6:.1f}")
        for name, one in starts.items()
    ]
    out = output.results()
    out.print(output.table("EfficientNet-Lite0, measured", columns, rows))
    cold, warm = starts["cold"], starts["warm"]
    fleet = simulate(cold, warm, workers, per_second, bandwidth * 1e9, readers)
    alone = max(number / per_second + cold.seconds for number in range(workers))
    facts = {
        "all READY, s": round(max(fleet.ready), 1),
        "the same, each compiling, s": round(alone, 1),
        "compiles": fleet.compiles,
        "GB read": round(fleet.read / 1e9, 2),
        "CPU hours of compiling spared": round((workers - fleet.compiles) * (cold.seconds - warm.seconds) / 3600, 2),
    }
    out.print(output.table(f"{workers} workers, simulated", ("figure", ""), [(k, str(v)) for k, v in facts.items()]))
    measures = {name: vars(one) for name, one in starts.items()}
    output.write_json(json_path, {"measured": measures, "workers": workers, "simulated": facts})


if __name__ == "__main__":
    app()
