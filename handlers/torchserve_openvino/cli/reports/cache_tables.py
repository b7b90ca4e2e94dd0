"""Terminal output of the cache commands: tables, sizes, ages, progress bars."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from torchserve_openvino.cli.console import print_json
from torchserve_openvino.errors import DamagedEntryError

if TYPE_CHECKING:
    from torchserve_openvino.cache.storage.bundle import Moved
    from torchserve_openvino.cache.storage.store import Freed, Problem, Store

_FIELDS = ("model", "device", "cpu", "torch", "openvino")


def rows(store: "Store") -> tuple[list[dict[str, Any]], int]:
    """Returns the entries, JSON-safe and most recently used first, and the number of those that could not be read."""
    from torchserve_openvino.cache.storage.housekeeping import manifests
    from torchserve_openvino.cache.storage.manifest import ForeignSchemaError

    found_rows: list[dict[str, Any]] = []
    unread = 0
    for manifest in reversed(manifests(store.root)):
        try:
            entry = store.load(manifest.kind, manifest.key)
        except (OSError, DamagedEntryError, ForeignSchemaError):
            unread += 1
            continue
        found_rows.append(
            {
                "kind": entry.kind,
                "key": entry.key,
                "bytes": manifest.bytes + sum(ref.bytes for ref in entry.files.values()),
                "created": entry.created,
                "last_used": datetime.fromtimestamp(manifest.used).astimezone().isoformat(timespec="seconds"),
                "fields": dict(entry.fields),
                "files": {name: ref._asdict() for name, ref in entry.files.items()},
            }
        )
    return found_rows, unread


def table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """Makes a table with a row for each entry; a field that no entry has gets no column."""
    shown = [name for name in _FIELDS if any(_field(entry["fields"], name) for entry in entries)]
    result = Table("kind", "key", "size", "age", "last used", *shown)
    result.columns[2].justify = "right"
    for column in result.columns[:5]:
        column.no_wrap = True
    for entry in entries:
        facts = [_field(entry["fields"], name) or "-" for name in shown]
        times = [_ago(entry["created"]), _ago(entry["last_used"])]
        cells = [entry["kind"], entry["key"][:12], human(entry["bytes"]), *times, *facts]
        result.add_row(*(Text(str(cell)) for cell in cells))
    return result


def _field(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None and isinstance(fields.get("capabilities"), Mapping):
        value = fields["capabilities"].get(name)
    if isinstance(value, Mapping):
        value = value.get("name") or next(iter(value.values()), None)
    text = "" if value is None else str(value)
    return text if len(text) <= 40 else text[:39] + "…"


def human(size: float) -> str:
    """Formats a number of bytes in a fitting unit: ``1.5 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _ago(moment: str) -> str:
    try:
        seconds = max(0.0, time.time() - datetime.fromisoformat(moment).timestamp())
    except (ValueError, OverflowError):
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def count(number: int, one: str, many: str) -> str:
    """Formats a number with its noun: ``1 entry``, ``2 entries``."""
    return f"{number} {one if number == 1 else many}"


def sized(entries: int, size: int) -> str:
    """Formats a number of entries with their size: ``2 entries, 1.5 GB``."""
    return f"{count(entries, 'entry', 'entries')}, {human(size)}"


def print_problems(problems: "Sequence[Problem]") -> None:
    """Prints each problem on a line on stdout, and its file on the next: paths are too long for a table."""
    for problem in problems:
        what = " ".join(part for part in (problem.kind, problem.key[:12]) if part)
        typer.echo(f"{what}: {problem.reason}" if what else problem.reason)
        if problem.path:
            typer.echo(f"    {problem.path}")


def print_freed(store: "Store", freed: "Freed", as_json: bool) -> None:
    """Prints what was removed and what is left."""
    left = store.size()
    if as_json:
        removed = {"entries": freed.entries, "files": freed.files, "bytes": freed.bytes}
        print_json({"dir": str(store.root), "freed": removed, "left": left._asdict()})
        return
    gone, rest = sized(freed.entries, freed.bytes), sized(left.entries, left.bytes)
    typer.echo(f"dropped: {gone}; left: {rest} in {store.root}")


def print_moved(moved: "Moved", where: str) -> None:
    """Prints the problems, then how much was exported or imported."""
    print_problems(moved.problems)
    typer.echo(f"{sized(moved.entries, moved.bytes)} {where}")


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Shows a progress bar on stderr; yields its update function (bytes done, bytes in total), None off a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
