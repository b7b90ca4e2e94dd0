"""Reports in files, so that they outlive their workers, and can be read while a worker is busy."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from torchserve_openvino.files.atomic import write_atomically

# Reports of all models and workers; the oldest are removed.
MOST_FILES = 64
# No report is larger; such a file was not written by a worker.
_MOST_BYTES = 64 << 20
_FOLDER = "reports"
_SUFFIX = ".report.json"


class Saved(NamedTuple):
    """A saved report.

    Attributes:
        report: As `describe_handle` returns it.
        cause: Why the worker refused the model; empty if it did not.
        pid: The worker's process.
        time: When it was saved, in seconds since 1970.
        version: The model's version.
    """

    report: dict[str, Any]
    cause: str
    pid: int
    time: float
    version: str


def save(state: Path, name: str, version: str, report: Mapping[str, Any], cause: str = "") -> None:
    """Writes a worker's report in place of its previous one.

    Args:
        state: The folder for what outlives processes (`cache.open.state_folder`).
        name: The model's name.
        version: Its version.
        report: What to save, JSON-safe.
        cause: Why the worker refuses the model; empty if it does not.

    Raises:
        OSError: The folder can't be written.
    """
    folder = state / _FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = {"name": name, "version": version, "pid": os.getpid(), "time": time.time(), "cause": cause}
    path = folder / f"{quote(name, safe='')}@{os.getpid()}{_SUFFIX}"
    write_atomically(path, json.dumps({**facts, "report": report}).encode(), sync=False)
    for old in _files(folder)[MOST_FILES:]:
        old.unlink(missing_ok=True)


def last_saved(state: Path, name: str, version: str = "", pids: set[int] | None = None) -> Saved | None:
    """Returns the newest report of a model; None if there is none that can be read.

    Args:
        state: The folder that was passed to `save`.
        name: The model's name.
        version: Its version; any if empty.
        pids: Workers to which the report must belong; any if None.
    """
    for path in _files(state / _FOLDER, name):
        saved = _read(path)
        if saved is None or (version and saved.version != version) or (pids is not None and saved.pid not in pids):
            continue
        return saved
    return None


def _files(folder: Path, name: str | None = None) -> list[Path]:
    """Returns the files of one model, or of all, newest first."""
    start = "" if name is None else f"{quote(name, safe='')}@"
    dated = []
    for path in folder.glob(f"*{_SUFFIX}") if folder.is_dir() else ():
        if path.name.startswith(start):
            try:
                dated.append((path.stat().st_mtime_ns, path))
            except FileNotFoundError:
                # Another worker removed it.
                continue
    return [path for _, path in sorted(dated, reverse=True)]


def _read(path: Path) -> Saved | None:
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        plain = json.loads(path.read_text(encoding="utf-8"))
        report = plain["report"]
        if not isinstance(report, dict):
            return None
        return Saved(report, str(plain["cause"]), int(plain["pid"]), float(plain["time"]), str(plain["version"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
