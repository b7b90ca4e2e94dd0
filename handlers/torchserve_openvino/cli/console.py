"""What the commands share: where text goes, and how a failure ends."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import typer
from rich.console import Console

# Wide enough that a table in a file or a pipe is not cut at the 80 columns that rich assumes there.
_PIPE_WIDTH = 160


def stdout() -> Console:
    """Console for tables: colours and the terminal's width on a terminal only."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=_PIPE_WIDTH)
    return console


def print_json(value: Any) -> None:
    """JSON on stdout, never wrapped or coloured."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def fail(message: str) -> NoReturn:
    """One message on stderr, exit code 1."""
    typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
    typer.echo(message, err=True)
    raise typer.Exit(1)


@contextlib.contextmanager
def steps(elsewhere: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr with the step under way, on a terminal.

    Args:
        elsewhere: Takes the steps where stderr is no terminal.
    """
    if not sys.stderr.isatty():
        yield elsewhere
        return
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    with console.status("starting") as status:
        yield lambda text: status.update(text[: max(20, console.width - 4)])
