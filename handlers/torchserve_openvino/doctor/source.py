"""Quotes the user's source lines and shortens their paths."""

import linecache
from pathlib import Path


def split_where(where: str) -> tuple[str, int]:
    """Splits ``file:line``, optionally followed by a function's name, into path and line; line 0 if there is none."""
    path, _, line = where.partition(" ")[0].rpartition(":")
    return (path, int(line)) if line.isdigit() else (where, 0)


def quoted(where: str) -> str:
    """Returns the source line at a place; empty if it cannot be read."""
    path, line = split_where(where)
    return linecache.getline(path, line).strip() if line else ""


def short(where: str, root: Path | None) -> str:
    """Makes a place relative to the model's folder or the working folder, if it lies below one of them."""
    for folder in (root, Path.cwd()):
        if folder is not None and where.startswith(f"{folder}/"):
            return where.removeprefix(f"{folder}/")
    return where
