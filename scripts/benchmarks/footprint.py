"""Shows where a worker's memory and its seconds to READY go, step by step, and whose the memory is.

    python scripts/benchmarks/footprint.py model-store/efficientnet-lite0.mar
    python scripts/benchmarks/footprint.py packaged.mar --request cat.jpg --workers 2 --json footprint.json

Each worker is a process of its own that loads the archive without a server, as `torchserve-openvino serve` does. An
archive with graphs inside (`package --precompile`) starts warm. Seconds are CPU time of all threads, which a busy
machine changes less than the clock; memory is measured after each step. With --workers several run at the same time,
so that USS and PSS show what they share.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output

SCRIPTS = Path(__file__).resolve().parents[1]


def measured(archive: Path, request: Path | None, workers: int) -> list[dict[str, Any]]:
    """Runs workers next to each other, all of the same unpacked archive."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.startups.footprint_worker", str(archive.resolve())]
    command += [str(request.resolve())] if request is not None else []
    pipe = subprocess.PIPE
    running = [
        subprocess.Popen(command, cwd=SCRIPTS, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        for _ in range(workers)
    ]
    try:
        for process in running:
            assert process.stdout is not None
            while (line := process.stdout.readline()) and line.strip() != "READY":
                pass
            if not line:
                raise typer.Exit(1)
        results = []
        for process in running:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            results.append(json.loads(process.stdout.readline()))
        return results
    finally:
        for process in running:
            process.kill()
            process.wait()


def main(
    archive: Annotated[Path, typer.Argument(help="A .mar, or the folder into which it was unpacked")],
    request: Annotated[Path | None, typer.Option(help="Body of a request to send after READY")] = None,
    workers: Annotated[int, typer.Option(help="Workers at the same time", min=1)] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
) -> None:
    with tempfile.TemporaryDirectory(prefix="tsov-footprint-") as folder:
        if archive.is_file():
            from torchserve_openvino.packaging.archive import extract

            extract(archive, Path(folder))
        results = measured(archive if archive.is_dir() else Path(folder), request, workers)
    out, first = output.results(), results[-1]
    columns = ("step", "RSS", "USS", "PSS", "modules", "CPU s so far")
    rows = [
        (name, *(f"{facts[key]:.0f}" for key in ("rss", "uss", "pss", "modules")), f"{facts['cpu']:.2f}")
        for name, facts in first["steps"].items()
    ]
    out.print(output.table("memory in MB", columns, rows))
    out.print(output.table("resident MB by owner", ("owner", "MB"), _sorted(first["owners"], ".0f")))
    out.print(output.table("CPU seconds by phase", ("phase", "s"), _sorted(first["phases"], ".2f")))
    out.print(f"tracing modules: {first['tracing modules']}; traces {first['cache']['traces']}", markup=False)
    if request is not None:
        out.print(f"imported by the first request: {first['imported by the first request']}", markup=False)
    output.write_json(json_path, {"archive": archive.name, "workers": results})


def _sorted(figures: dict[str, float], form: str) -> list[tuple[str, str]]:
    return [(name, format(value, form)) for name, value in sorted(figures.items(), key=lambda one: -one[1])]


if __name__ == "__main__":
    typer.run(main)
