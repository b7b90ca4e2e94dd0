"""`torchserve-openvino cache ls|verify|prune|export|import|clear`."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchserve_openvino.cli.console import fail, print_json, stdout
from torchserve_openvino.cli.reports import cache_tables as tables
from torchserve_openvino.errors import CacheDirectoryError, TorchServeOpenVINOError

if TYPE_CHECKING:
    from torchserve_openvino.cache.storage.store import Store

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

cache = typer.Typer(
    help="List, verify, shrink or clear the cache of compiled models, or copy it to another machine.",
    no_args_is_help=True,
)


def size_of(text: str) -> int:
    """Converts ``5GB``, ``512 MiB`` or ``1000`` to bytes."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise typer.BadParameter(f"{text!r} is not a size; write e.g. 5GB, 512MiB or a number of bytes.")
    unit = (match[2] or "").lower()
    return int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** (" kmgt".index(unit[0]) if unit else 0))


def age_of(text: str) -> float:
    """Converts ``30d``, ``12h``, ``2w``, ``90m`` or ``10s`` to seconds."""
    match = _AGE.fullmatch(text.strip())
    if not match:
        raise typer.BadParameter(f"{text!r} is not an age; write e.g. 30d, 12h or 2w.")
    return float(match[1]) * _SECONDS[match[2].lower()]


Dir = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="The cache's folder. By default OPENVINO_TORCH_CACHE_DIR, else torchserve-openvino in your cache folder.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@cache.command("ls")
def ls(folder: Dir = None, as_json: Json = False) -> None:
    """List the entries, most recently used first.

    Examples:

        torchserve-openvino cache ls

        torchserve-openvino cache ls --json | jq '.entries[].key'
    """
    store = _look(folder)
    rows, unread = tables.rows(store)
    size = store.size()
    if as_json:
        print_json({"dir": str(store.root), "entries": rows, "unreadable": unread, "total": size._asdict()})
        return
    if rows:
        stdout().print(tables.table(rows))
    typer.echo(f"{tables.sized(size.entries, size.bytes)} in {store.root}")
    if unread:
        typer.echo(f"not shown: {unread} damaged (see torchserve-openvino cache verify) or of another version")


@cache.command("verify")
def verify(folder: Dir = None, as_json: Json = False) -> None:
    """Read every file and compare it with its checksum. Removes nothing: a damaged entry is rebuilt on its next use.

    Exit code 0 if all is well, 1 otherwise.

    Examples:

        torchserve-openvino cache verify

        torchserve-openvino cache verify --dir /var/cache/torchserve-openvino --json
    """
    store = _look(folder)
    with tables.progress("Reading") as progress:
        problems = store.verify(progress)
    if as_json:
        print_json(
            {"dir": str(store.root), "ok": not problems, "problems": [problem._asdict() for problem in problems]}
        )
    else:
        size = store.size()
        tables.print_problems(problems)
        verdict = tables.count(len(problems), "problem", "problems") if problems else "all in order"
        typer.echo(f"{tables.sized(size.entries, size.bytes)} in {store.root}: {verdict}")
    if problems:
        raise typer.Exit(1)


@cache.command("prune")
def prune(
    folder: Dir = None,
    to: Annotated[
        int | None,
        typer.Option(parser=size_of, metavar="SIZE", help="Size to shrink to, e.g. 5GB or 512MiB.", show_default=False),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=age_of,
            metavar="AGE",
            help="Drop entries that were not used for that long, e.g. 30d or 12h.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Drop the least recently used entries and leftovers of interrupted writes. By default down to 20 GiB.

    Examples:

        torchserve-openvino cache prune --to 5GB

        torchserve-openvino cache prune --older-than 30d
    """
    store = _change(folder)
    limit = sys.maxsize if to is None and older_than is not None else to
    tables.print_freed(store, store.prune(limit, older_than=older_than), as_json)


@cache.command("export")
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The tar file to write.", show_default=False)],
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY]...", help="Keys or key prefixes, as ls shows them.", show_default=False),
    ] = None,
    folder: Dir = None,
) -> None:
    """Write all entries, or the named ones, to a tar file.

    Exit code 1 if an entry was damaged and left out.

    Examples:

        torchserve-openvino cache export warm.tar

        torchserve-openvino cache export one.tar 3f9a1c22b07d
    """
    from torchserve_openvino.cache.storage import bundle

    store = _look(folder)
    chosen = _matching(store, keys) if keys else None
    with tables.progress("Writing") as progress, reporting_errors(file):
        moved = bundle.export(store, file, chosen, progress=progress)
    tables.print_moved(moved, f"written to {file}")
    if moved.problems:
        raise typer.Exit(1)


@cache.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A tar file that export wrote.", show_default=False)],
    folder: Dir = None,
    limit: Annotated[float, typer.Option(help="Most bytes of the cache, in 10^9, as limit_gb.", min=0.001)] = 20.0,
) -> None:
    """Import the entries of a tar file. Every file is verified; damaged entries are reported and left out.

    Compiled models are code: import them only from sources you would run a program from.

    Exit code 1 if something was left out.

    Examples:

        torchserve-openvino cache import warm.tar
    """
    from torchserve_openvino.cache.storage import bundle

    store = _change(folder, make=True)
    store.limit_bytes = int(limit * 1e9)
    with tables.progress("Reading") as progress, reporting_errors(file):
        moved = bundle.import_(store, file, progress=progress)
    tables.print_moved(moved, f"imported into {store.root}")
    if moved.problems:
        raise typer.Exit(1)


@cache.command("clear")
def clear(folder: Dir = None, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Remove everything from the cache.

    Examples:

        torchserve-openvino cache clear --yes
    """
    store = _change(folder)
    size = store.size()
    if not yes:
        typer.confirm(f"Drop {tables.sized(size.entries, size.bytes)}, in {store.root}?", abort=True, err=True)
    tables.print_freed(store, store.clear(), as_json=False)


def default_dir() -> Path:
    """Returns the folder in which the backend keeps its cache by default."""
    from torchserve_openvino.cache.storage.remote import is_remote, local_folder
    from torchserve_openvino.config.options import ENV_CACHE_DIR, cache_root

    configured = os.environ.get(ENV_CACHE_DIR, "").strip()
    if is_remote(configured):
        # What this machine has of it.
        return local_folder(configured, cache_root())
    return Path(os.path.normpath(cache_root() / Path(configured).expanduser())) if configured else cache_root()


def _open(folder: Path | None, *, writable: bool) -> "Store":
    from torchserve_openvino.cache.storage.store import Store

    try:
        return Store(folder.expanduser() if folder is not None else default_dir(), writable=writable)
    except CacheDirectoryError as error:
        fail(str(error))


def _look(folder: Path | None) -> "Store":
    """Opens a store read-only; one that does not exist is empty, and a note says so."""
    store = _open(folder, writable=False)
    if not store.root.exists():
        typer.echo(f"note: {store.root} does not exist", err=True)
    return store


def _change(folder: Path | None, *, make: bool = False) -> "Store":
    """Opens a store for writing; one that does not exist is created if ``make`` is set, else it is empty."""
    store = _look(folder)
    if not make and not store.root.exists():
        return store
    store = _open(folder, writable=True)
    if store.why_read_only is not None:
        fail(f"{store.why_read_only}.")
    return store


@contextlib.contextmanager
def reporting_errors(file: Path) -> Iterator[None]:
    """Reports an error as one message that ends the command."""
    try:
        yield
    except OSError as error:
        fail(f"{error.filename or file}: {error.strerror or error}")
    except TorchServeOpenVINOError as error:
        fail(f"{file}: {error}")


def _matching(store: "Store", prefixes: list[str]) -> set[str]:
    from torchserve_openvino.cache.storage.housekeeping import manifests

    known = {manifest.key for manifest in manifests(store.root)}
    chosen = set()
    for text in prefixes:
        matches = {key for key in known if key.startswith(text.lower())}
        if len(matches) != 1:
            what = "no entry" if not matches else f"{len(matches)} entries"
            raise typer.BadParameter(f"{what} in {store.root} begin with {text!r}; see torchserve-openvino cache ls.")
        chosen |= matches
    return chosen
