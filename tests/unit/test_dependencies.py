"""What setup.py declares is what the package imports (deptry)."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).parents[2]


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: found.update(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    return found


def test_nothing_is_declared_and_unused_or_used_and_undeclared(declared: dict[str, Any], tmp_path: Path) -> None:
    extras = declared["extras_require"]
    # These are for scripts/ and tests/.
    beside = {requirement for name in ("bench", "dev", "examples") for requirement in extras[name]}
    served = set(declared["install_requires"]).union(
        *(extras[name] for name in extras.keys() - {"bench", "dev", "examples"})
    )
    files = {"requirements-files": served, "requirements-files-dev": beside - served}
    options = []
    for option, requirements in files.items():
        (tmp_path / option).write_text("\n".join(sorted(requirements)), encoding="utf-8")
        options += [f"--{option}", str(tmp_path / option)]
    command = [sys.executable, "-m", "deptry", "handlers", "--config", "pyproject.toml", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
