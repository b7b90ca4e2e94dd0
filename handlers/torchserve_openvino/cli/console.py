"""Output helpers that the commands share: consoles, JSON, error messages, progress."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import typer
from rich.console import Console

# A command that compiles models dies with OpenVINO's compiler. The next run finds out where and why, and goes on; the
# third is for what only shows then.
_RUNS = 3
# What ends a command from outside, beside Ctrl-C.
_ENDS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
# Wide enough that a table in a file or a pipe is not cut at the 80 columns that rich assumes there.
_PIPE_WIDTH = 160


def stdout() -> Console:
    """Returns a console for tables: colored and as wide as the terminal, or plain and of fixed width elsewhere."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=_PIPE_WIDTH)
    return console


def print_json(value: Any) -> None:
    """Prints a value as JSON on stdout, never wrapped or colored."""
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


def outlive_deaths() -> None:
    """Returns in a child process, which runs the command; starts another one if a signal for its own errors ends it.

    This process only waits, and ends with the exit code of the child.
    """
    if not hasattr(os, "fork"):
        return
    crashes = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
    for left in reversed(range(_RUNS)):
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            return
        # Ctrl-C reaches the child too, which says what it interrupts.
        before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
        before |= {number: signal.signal(number, partial(_pass_on, child)) for number in _ENDS}
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for number, handler in before.items():
            signal.signal(number, handler)
        if code >= 0:
            sys.exit(code)
        name = signal.Signals(-code).name
        if -code not in crashes or not left:
            typer.echo(f"error: the process was ended by {name}", err=True)
            sys.exit(1)
        typer.echo(f"the process was ended by {name}; once more, to find out where", err=True)


def _pass_on(child: int, number: int, frame: object) -> None:
    # It may just have ended.
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Ends the block by an exception on SIGTERM and SIGHUP too, so that servers and folders do not outlive it."""

    def interrupt(signum: int, frame: object) -> NoReturn:
        raise SystemExit(128 + signum)

    before = {signum: signal.signal(signum, interrupt) for signum in _ENDS}
    try:
        yield
    finally:
        for restored, handler in before.items():
            signal.signal(restored, handler)
