"""The output of the benchmarks (progress, tables, JSON), and options that are lists of names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
# Progress goes to stderr, results to stdout.
progress = Console(stderr=True, highlight=False)


def results(width: int = 150) -> Console:
    """The console for results; ``width`` applies to files and pipes, which have none."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(width=width, highlight=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """A table whose first columns are aligned left, the others right.

    Args:
        title: Above the table; empty for none.
        columns: Headings.
        rows: Cells; a short row is filled up.
        left: How many columns are text.
    """
    rich_table = Table(title=title or None)
    for position, column in enumerate(columns):
        rich_table.add_column(column, justify="left" if position < left else "right")
    for row in rows:
        rich_table.add_row(*row, *[""] * (len(columns) - len(row)))
    return rich_table


def number(value: float | None, form: str = ".2f") -> str:
    """A cell; empty where there is no value."""
    return "" if value is None else format(value, form)


def write_json(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Writes all figures with the environment they were measured in; does nothing without a path."""
    if path is None:
        return
    from torchserve_openvino.report.compile_report import environment

    path.write_text(json.dumps({"environment": environment(), **figures}, indent=2, default=str), encoding="utf-8")
    progress.print(f"wrote {path}")


def write_section(name: str, lines: Sequence[str], page: Path = PAGE) -> None:
    """Renews what a benchmark has written into a page, between ``<!-- NAME -->`` and ``<!-- end of NAME -->``.

    Args:
        name: The benchmark's file name.
        lines: Markdown; `measured_on` follows.
        page: The page.

    Raises:
        ValueError: The page has no such section.
    """
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, opened, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"{page} has no section between {begin} and {end}")
    middle = "\n".join([*lines, "", measured_on()])
    page.write_text(f"{before}{begin}\n\n{middle}\n\n{end}{after}", encoding="utf-8")
    progress.print(f"wrote {page}")


def measured_on() -> str:
    """A sentence on the machine, the versions and the commit of what is measured now."""
    from torchserve_openvino.bench.machine import machine
    from torchserve_openvino.serving.threads import usable_cores

    used = machine(usable_cores())
    versions = ", ".join(f"{name} {version}" for name, version in used["versions"].items())
    done = subprocess.run(
        ["git", "-C", str(PAGE.parent), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    commit = done.stdout.strip() or "unknown"
    return f"Measured on {used['processor']}, {used['cores']} cores; {versions}; commit {commit}."


def chosen(text: str, known: Iterable[str], option: str) -> list[str]:
    """Returns comma-separated names, in the order of ``known``.

    Raises:
        typer.BadParameter: A name is unknown.
    """
    selected, names = [name.strip() for name in text.split(",")], list(known)
    if unknown := [name for name in selected if name not in names]:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; choose from {', '.join(names)}", param_hint=option)
    return [name for name in names if name in selected]


def chosen_by_prefix(text: str, known: Iterable[str], option: str) -> list[str]:
    """Returns the names that begin with one of the comma-separated prefixes, in the order of ``known``; else all.

    Raises:
        typer.BadParameter: No name begins with a prefix.
    """
    names, prefixes = list(known), tuple(prefix.strip() for prefix in text.split(",") if prefix.strip())
    if unknown := [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in names)]:
        message = f"unknown: {', '.join(unknown)}; choose from {', '.join(names)}"
        raise typer.BadParameter(message, param_hint=option)
    return [name for name in names if not prefixes or name.startswith(prefixes)]
