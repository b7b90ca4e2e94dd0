"""The user's lines: quoted, and with paths that are short enough to read."""

import linecache
from pathlib import Path


def split_where(where: str) -> tuple[str, int]:
    """``file:line``, perhaps followed by a function's name, as its parts; line 0 where there is none."""
    path, _, line = where.partition(" ")[0].rpartition(":")
    return (path, int(line)) if line.isdigit() else (where, 0)


def quoted(where: str) -> str:
    """The line itself; empty where it cannot be read."""
    path, line = split_where(where)
    return linecache.getline(path, line).strip() if line else ""


def short(where: str, root: Path | None) -> str:
    """The place relative to the model's folder, or to the working folder, where it lies below one of them."""
    for folder in (root, Path.cwd()):
        if folder is not None and where.startswith(f"{folder}/"):
            return where.removeprefix(f"{folder}/")
    return where
