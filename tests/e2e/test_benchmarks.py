"""The benchmark scripts run to their end and write what they promise; how fast, only a quiet machine can say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torchserve_process import ROOT


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_benchmark_handler(tmp_path: Path) -> None:
    figures = tmp_path / "handler.json"
    arguments = ("--models", "efficientnet-lite0", "--runs", "10", "--warmup", "1", "--json", str(figures))
    assert "handler.predict" in run("benchmark_handler.py", *arguments, "--options", "{image: {fold: true}}")
    (result,) = json.loads(figures.read_text())["results"]
    assert {step["step"] for step in result["steps"]} >= {"handler.model(tensor)", "handler.handle(jpeg)"}
    assert all(step["median_ms"] > 0 for step in result["steps"])


@pytest.mark.slow
def test_benchmark_serving(tmp_path: Path) -> None:
    for extra in ("aiohttp", "litserve", "matplotlib"):
        pytest.importorskip(extra)
    figures, picture = tmp_path / "serving.json", tmp_path / "serving.png"
    load = ("--only", "ours", "--concurrency", "2", "--rates", "5", "--seconds", "1", "--warmup", "0.5")
    assert "ours" in run("benchmark_serving.py", *load, "--json", str(figures), "--plot", str(picture))
    assert figures.stat().st_size > 500 and picture.read_bytes().startswith(b"\x89PNG")
