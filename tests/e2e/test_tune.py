"""The tuner and `bench` on a small archive, as docs/tuning.md has them."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import run
from tuned_archive import left_behind, make_archive
from typer.testing import CliRunner

from documents import commands
from torchserve_openvino.cli import app
from torchserve_openvino.config import load_serving_config

# Few trials, short windows: the figures mean nothing, the way is the same.
EFFORT = "{trials: 4, window: 0.5, minutes: 1, precisions: [f32], batch_sizes: [1, 4], delays: [1]}"


@pytest.fixture
def folder(tmp_path: Path, network: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    make_archive(tmp_path, network)
    (tmp_path / "tune.yaml").write_text(EFFORT)
    # A folder for temporary files that no other test has: its name tells the servers of this test from those of
    # tests that run beside it. Short, as the paths of Unix sockets have to be.
    with tempfile.TemporaryDirectory(prefix="tune-") as scratch:
        monkeypatch.setenv("TMPDIR", scratch)
        monkeypatch.setattr(tempfile, "tempdir", scratch)
        yield tmp_path
        assert not left_behind(Path(scratch).name)


def documented(start: str) -> list[str]:
    return [line for line in commands() if line.startswith(start)]


@pytest.mark.slow
def test_the_tuner_writes_a_valid_yaml_with_its_evidence(folder: Path) -> None:
    # A guide has a shorter one.
    (command,) = [line for line in documented("torchserve-openvino tune") if "--minutes" in line]
    done = run(command, folder, "--settings", "tune.yaml", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert "ways to compute" in done.stderr
    assert facts["choice"] and facts["trials"] and not facts["rejected"]
    assert "five windows in a row" in facts["confirmation"] or "held at no rate" in facts["confirmation"]
    assert all(window["requests"] for trial in facts["trials"] for window in trial["windows"])
    tuned = folder / "net-tuned" / "model-config.yaml"
    load_serving_config(tuned)
    assert "# The service of numbers." in tuned.read_text()
    page = (folder / "net-tuned" / "tune.html").read_text()
    assert "<svg" in page and not re.search(r"(src|href)=", page)
    assert json.loads((folder / "net-tuned" / "tune.json").read_text()) == facts
    # All trials are there: a second run starts no server.
    again = json.loads(run(command, folder, "--settings", "tune.yaml", "--json").stdout)
    assert [trial["windows"] for trial in again["trials"]] == [trial["windows"] for trial in facts["trials"]]

    assert facts["autoscaling"]["keda"]["metadata"]["threshold"]
    (package,) = documented("torchserve-openvino package --tuned")
    assert run(package, folder).returncode == 0
    assert "tuned" not in subprocess.run(
        [sys.executable, "-m", "torchserve_openvino.cli", "check", "model-store/net.mar"],
        cwd=folder, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip

    for line in documented("torchserve-openvino bench"):
        done = run(line, folder, "--seconds", "0.5", "--rounds", "2", "--json")
        measured = json.loads(done.stdout)
        assert all(target["requests"] for target in measured["targets"]), done.stderr
        assert bool(measured["verdict"]) == ("--against" in line)


def test_what_cannot_be_tuned_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "unlike").mkdir()
    (folder / "unlike" / "0.json").write_text('{"inputs": [[1.0]]}')
    for options, message in [
        ("net.mar --requests absent", "absent: requests: is no folder"),
        ("net.mar", "has no warmup.samples"),
        ("net.mar --requests requests --p99 fast", "p99.*not a time such as 50ms"),
        ("net.mar --requests requests --goal latency", "needs a rate"),
        ("tune.yaml --requests requests", "cannot be read as a .mar"),
        ("net.mar --requests unlike", r"0\.json.*is answered 400 by eager PyTorch"),
    ]:
        done = CliRunner().invoke(app, ["tune", *options.split()])
        assert done.exit_code == 1, done.output
        assert re.search(message, done.stderr), done.stderr
        assert "Traceback" not in done.stderr
