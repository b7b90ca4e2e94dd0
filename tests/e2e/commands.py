"""Runs the documented commands of this package, in this environment."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(command: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Runs ``torchserve-openvino ...`` in a folder."""
    words = [sys.executable, "-m", "torchserve_openvino.cli", *shlex.split(command)[1:], *more]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


def package(command: str, folder: Path, *more: str) -> dict[str, Any]:
    """Runs ``torchserve-openvino package ...`` with ``--json``, and returns what it prints."""
    done = run(command, folder, "--json", *more)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    made: dict[str, Any] = json.loads(done.stdout)
    return made
