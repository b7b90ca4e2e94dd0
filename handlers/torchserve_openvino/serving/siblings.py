"""Finds the other workers of a model, and shares their state.

TorchServe starts all workers of a model in the folder of its unpacked archive, as children of one process, but does not
tell a worker about the others.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from torchserve_openvino.cache.open import WORKERS_PREFIX
from torchserve_openvino.files.atomic import write_atomically
from torchserve_openvino.files.json_text import read_json

logger = logging.getLogger(__name__)

PROC = Path("/proc")
# The script that TorchServe starts for each worker.
_PROGRAM = b"model_service_worker.py"
# Folder in the unpacked archive, with a file for each worker.
FOLDER = f"{WORKERS_PREFIX}workers"
# No report is larger than this; such a file was not written by a worker.
_MAX_BYTES = 1 << 20


def sibling_pids(proc: Path = PROC) -> list[int]:
    """Returns the process ids of this model's workers; only this one's where ``/proc`` does not show them."""
    own = os.getpid()
    parent, folder = _parent(proc, own), _folder(proc, own)
    if parent is None or folder is None or not _is_worker(proc, own):
        return [own]
    pids = (int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal())
    return [
        pid
        for pid in sorted(pids)
        if _parent(proc, pid) == parent and _folder(proc, pid) == folder and _is_worker(proc, pid)
    ]


def _is_worker(proc: Path, pid: int) -> bool:
    try:
        return _PROGRAM in (proc / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


def _parent(proc: Path, pid: int) -> int | None:
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        # The name of the process is in parentheses, and may contain parentheses itself.
        return int(text.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _folder(proc: Path, pid: int) -> Path | None:
    try:
        return (proc / str(pid) / "cwd").readlink()
    except OSError:
        return None


class Board:
    """A folder in which the workers of a model publish their state.

    Args:
        model_dir: The unpacked archive.
    """

    def __init__(self, model_dir: Path) -> None:
        self._folder = model_dir / FOLDER
        self._failed = False

    def post(self, facts: dict[str, Any]) -> None:
        """Publishes this worker's state in place of the previous one; warns once if the folder is not writable."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_atomically(self._folder / f"{os.getpid()}.json", json.dumps(facts).encode(), sync=False)
        except OSError as error:
            if not self._failed:
                self._failed = True
                logger.warning("The other workers' reports won't show this one: %s", error)

    def read(self) -> list[dict[str, Any]]:
        """Returns the last state of each running worker, with its pid; removes the files of workers that ended."""
        entries = []
        for path in sorted(self._folder.glob("*.json")) if self._folder.is_dir() else ():
            if not path.stem.isdecimal() or not _lives(int(path.stem)):
                path.unlink(missing_ok=True)
                continue
            try:
                if path.stat().st_size > _MAX_BYTES:
                    raise ValueError("it is too large")
                facts = read_json(path, allow_nan=True)
            except (OSError, ValueError) as error:
                logger.warning("The report of worker %s cannot be read: %s", path.stem, error)
                continue
            if isinstance(facts, dict):
                entries.append({"pid": int(path.stem), **facts})
        return entries


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
