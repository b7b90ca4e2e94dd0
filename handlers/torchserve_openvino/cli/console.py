"""Output helpers that the commands share: consoles, JSON, error messages, progress."""

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
    """Returns a console for tables: coloured and as wide as the terminal, or plain and of fixed width elsewhere."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=_PIPE_WIDTH)
    return console


def print_json(value: Any) -> None:
    """Prints a value as JSON on stdout, never wrapped or coloured."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def fail(message: str) -> NoReturn:
    """Prints an error message on stderr and exits with code 1."""
    typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
    typer.echo(message, err=True)
    raise typer.Exit(1)


@contextlib.contextmanager
def steps(elsewhere: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Shows a spinner with the current step on stderr; yields the function that takes each step's text.

    Args:
        elsewhere: The function to yield instead where stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield elsewhere
        return
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    with console.status("starting") as status:
        yield lambda text: status.update(text[: max(20, console.width - 4)])
