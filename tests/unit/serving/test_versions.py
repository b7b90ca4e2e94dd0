"""What a start does with versions that were not tested: it tries what is relied on, then warns or refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchserve_openvino.errors import UntestedVersionError
from torchserve_openvino.serving.versions import start as start_module
from torchserve_openvino.serving.versions.start import admit_versions
from torchserve_openvino.serving.versions.tested import TESTED, installed, minor, untested

KNOWN = ", ".join(TESTED["torch"])
# Makes this process see another version, or miss a private function, before anything is imported.
NEWER = """
from importlib import metadata
version = metadata.version
metadata.version = lambda name: "2.99.0+cpu" if name == "torch" else version(name)
"""
RENAMED = """
import torch._dynamo.convert_frame as frames
frames.get_side_effects_of_code = frames.get_compiled_code_side_effects
del frames.get_compiled_code_side_effects
"""
START = """
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.WARNING)
from torchserve_openvino.serving.versions.start import admit_versions
print(admit_versions(lambda: Path(sys.argv[1])))
"""


@pytest.fixture
def start(tmp_path: Path):
    """Runs a start's check in a process that begins with other code, and returns what it printed."""

    def run(first: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "sitecustomize.py").write_text(first, encoding="utf-8")
        paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        state = tmp_path / "state"
        state.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-c", START, str(state)],
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_tested_versions_cost_nothing() -> None:
    known = {name: version for name, version in installed().items() if minor(version) in TESTED[name]}
    assert "torch" in known, "run CI on this version, and name it in TESTED"
    if not untested():
        assert admit_versions(lambda: pytest.fail("no folder is needed")) == ""


def test_a_newer_version_is_tried_once_and_warned_of(start, tmp_path: Path) -> None:
    first = start(NEWER)
    assert f"Not tested with torch 2.99.0+cpu (tested: {KNOWN}). All 15 things" in first.stdout, first.stderr
    assert "trying what is relied on" in first.stderr
    (remembered,) = (tmp_path / "state").glob("versions-*.json")
    assert "torch2.99.0" in remembered.name
    assert not any(each["error"] for each in json.loads(remembered.read_text(encoding="utf-8")))
    second = start(NEWER)
    assert second.stdout == first.stdout
    assert "trying" not in second.stderr


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "late"])
def test_probes_that_did_not_end_are_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, killed: bool) -> None:
    def run(command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
        if not killed:
            raise subprocess.TimeoutExpired(command, 300)
        return subprocess.CompletedProcess(command, -9, "", "")

    monkeypatch.setattr(start_module, "untested", lambda: {"torch": "2.99.0"})
    monkeypatch.setattr(start_module.subprocess, "run", run)
    for _ in range(2):
        with pytest.raises(UntestedVersionError, match="the probes: "):
            admit_versions(lambda: tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_a_renamed_private_function_is_refused_by_name(start) -> None:
    done = start(NEWER + RENAMED)
    assert done.returncode
    message = done.stderr.strip().splitlines()[-1]
    assert "UntestedVersionError" in message
    assert "get_compiled_code_side_effects" in message
    assert f"torch 2.99.0+cpu (tested: {KNOWN})" in message
    assert "torchserve-openvino selftest" in message
