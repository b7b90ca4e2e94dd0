"""Draws the dashboard of `scripts/deploy/grafana.json` as a picture, from a server that runs.

Starts a Prometheus of its own, has it read the server's metrics for a while, asks it what each panel asks, and draws
the answers. Needs Prometheus (Debian's package `prometheus`) and the extra `bench`.

    python scripts/dashboard_picture.py 127.0.0.1:8080 --seconds 180 --output dashboard.png
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import yaml
from rich.console import Console
from rich.progress import track

from torchserve_openvino.bench.ports import free_ports

DASHBOARD = Path(__file__).resolve().parent / "deploy" / "grafana.json"
STEP = 2
# Grafana divides a dashboard's width into 24 columns.
_COLUMNS = 24
# Grafana's names of units, in words.
_UNITS = {"reqps": "requests/s", "cps": "per second", "percentunit": "share", "short": "", "s": "seconds"}

# Times and values by the name of a series.
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def main(
    target: Annotated[str, typer.Argument(help="HOST:PORT of the server's metrics")],
    seconds: Annotated[int, typer.Option(help="How long to read them", min=10)] = 180,
    output: Annotated[Path, typer.Option(help="The picture; its suffix chooses the format")] = Path("dashboard.png"),
    job: Annotated[str, typer.Option(help="What the server is called in it")] = "openvino",
    path: Annotated[str, typer.Option(help="Of the metrics")] = "/metrics",
    dashboard: Annotated[Path, typer.Option(help="A dashboard of Grafana's")] = DASHBOARD,
) -> None:
    """Draws a dashboard as a picture, from a server that runs.

    Example: python scripts/dashboard_picture.py 127.0.0.1:8080 --seconds 180 --output dashboard.png
    """
    program = shutil.which("prometheus")
    if program is None:
        sys.exit("Prometheus is not installed; Debian has it as the package prometheus.")
    shown = json.loads(dashboard.read_text(encoding="utf-8"))
    with prometheus(program, target, path, job) as url:
        start = time.time()
        for _ in track(range(seconds), "reading metrics", console=Console(stderr=True)):
            time.sleep(1)
        series = [query_range(url, panel, job, start, time.time()) for panel in shown["panels"]]
    draw(shown, series, output)
    print(f"wrote {output}")


@contextmanager
def prometheus(program: str, target: str, path: str, job: str, patience: float = 30) -> Iterator[str]:
    """Runs a Prometheus that reads one server, and yields its address.

    Args:
        program: Prometheus.
        target: HOST:PORT of the server.
        path: Of its metrics.
        job: What it is called.
        patience: Seconds until it has to have read the server.

    Raises:
        SystemExit: It does not start, or cannot read the server.
    """
    url = f"127.0.0.1:{free_ports(1)[0]}"
    scraped = {"job_name": job, "metrics_path": path, "static_configs": [{"targets": [target]}]}
    config = {"global": {"scrape_interval": f"{STEP}s"}, "scrape_configs": [scraped]}
    with tempfile.TemporaryDirectory(prefix="tsov-prometheus-") as folder:
        (Path(folder) / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [program, "--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={url}"]
        log = Path(folder) / "log"
        with log.open("wb") as console:
            process = subprocess.Popen(command, cwd=folder, stdout=console, stderr=console)
        try:
            until = time.monotonic() + patience
            while not _reads(f"http://{url}"):
                if process.poll() is not None or time.monotonic() > until:
                    sys.exit(f"Prometheus cannot read {target}{path}.\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.5)
            yield f"http://{url}"
        finally:
            process.terminate()
            process.wait(30)


def _reads(url: str) -> bool:
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": "up"}, trust_env=False).json()
    except (httpx.TransportError, json.JSONDecodeError):
        return False
    return any(series["value"][1] == "1" for series in answer["data"]["result"])


def query_range(url: str, panel: Mapping[str, Any], job: str, start: float, end: float) -> Series:
    """Returns what a panel shows, by the name of each series."""
    curves = {}
    for target in panel["targets"]:
        query = {"query": target["expr"].replace("$job", job), "start": start, "end": end, "step": STEP}
        answer = httpx.get(f"{url}/api/v1/query_range", params=query, trust_env=False)
        answer.raise_for_status()
        for series in answer.json()["data"]["result"]:
            name = ", ".join(series["metric"].values()) or panel["title"]
            times, values = zip(*series["values"], strict=True)
            curves[name] = ([moment - start for moment in times], [float(value) for value in values])
    return curves


def draw(dashboard: Mapping[str, Any], curves: Sequence[Series], output: Path) -> None:
    """Draws panels where the dashboard has them.

    Args:
        dashboard: As Grafana reads it.
        found: What each panel shows.
        output: The picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = [panel["gridPos"] for panel in dashboard["panels"]]
    rows = max(cell["y"] + cell["h"] for cell in places)
    figure = pyplot.figure(figsize=(16, rows * 0.36), layout="constrained")
    figure.suptitle(dashboard["title"], fontsize=14)
    grid = figure.add_gridspec(rows, _COLUMNS)
    for panel, cell, series in zip(dashboard["panels"], places, curves, strict=True):
        x, y = cell["x"], cell["y"]
        axes = figure.add_subplot(grid[y : y + cell["h"], x : x + cell["w"]])
        axes.set_title(panel["title"], fontsize=10, loc="left")
        if panel["type"] == "stat":
            _stat(axes, panel, series)
        else:
            _lines(axes, panel, series)
    figure.savefig(output, dpi=70)
    pyplot.close(figure)


def _unit(panel: Mapping[str, Any]) -> str:
    return str(panel["fieldConfig"]["defaults"].get("unit", ""))


def _stat(axes: Any, panel: Mapping[str, Any], series: Series) -> None:
    last = next((values[-1] for _, values in series.values()), None)
    percent = _unit(panel) == "percentunit"
    text = "no data" if last is None else f"{last:.1%}" if percent else f"{last:g}"
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=22, color="#20a060")
    axes.set_axis_off()


def _lines(axes: Any, panel: Mapping[str, Any], series: Series) -> None:
    for name, (times, values) in series.items():
        axes.plot(times, values, label=name, linewidth=1.4)
    # A line of zeros is to be seen, too.
    top = max((max(values) for _, values in series.values()), default=0.0) or 1.0
    axes.set_ylim(-0.04 * top, 1.1 * top)
    axes.set_ylabel(_UNITS.get(_unit(panel), _unit(panel)), fontsize=8)
    axes.set_xlabel("s", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if series:
        axes.legend(fontsize=8, loc="upper left")
    else:
        axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes, color="#888888")


if __name__ == "__main__":
    typer.run(main)
