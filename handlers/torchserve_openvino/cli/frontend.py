"""`torchserve-openvino frontend`."""

from pathlib import Path
from typing import Annotated

import typer

from torchserve_openvino.cli.console import fail, print_json
from torchserve_openvino.errors import FrontendError

_STATES = {
    "faulty": "requests get lost when a worker dies, and with asyncCommunication: true at other times too",
    "patched": "requests that wait or are answered when a worker dies get an answer",
    "outdated": "another version of this package has patched it; --patch renews that",
    "unknown": "its version is not TorchServe 0.12.0",
}


def frontend(
    patch: Annotated[bool, typer.Option("--patch", help="Patch it in place.")] = False,
    mend: Annotated[bool, typer.Option("--mend", help="The former name of --patch.", hidden=True)] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Put TorchServe's own file back.")] = False,
    jar: Annotated[
        Path | None,
        typer.Option(help="The archive; by default model-server.jar of the installed torchserve.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show whether TorchServe's Java frontend loses requests, and patch it.

    The frontend of TorchServe 0.12.0 forgets the requests that wait for their
    batch to fill when the worker dies: they are never answered. With
    asyncCommunication: true, as in the template for text generation, it also
    changes a map from two threads. In the end it loses a request, and with it
    the worker and all requests that it holds, and does not let a new one start
    while others come. --patch replaces three classes in model-server.jar, which
    keeps the old ones for --undo. Start TorchServe again afterwards.

    Examples:

        torchserve-openvino frontend

        torchserve-openvino frontend --patch

        torchserve-openvino frontend --undo
    """
    from torchserve_openvino.frontend import COMMAND, Frontend

    if mend:
        typer.echo("warning: --mend is now called --patch.", err=True)
    if (patch or mend) and undo:
        fail("--patch and --undo exclude each other.")
    try:
        installation = Frontend(jar) if jar is not None else Frontend.installed()
        changed = ((patch or mend) and installation.patch()) or (undo and installation.undo())
    except FrontendError as error:
        fail(str(error))
    if as_json:
        print_json({"path": str(installation.path), "state": installation.state, "changed": changed})
        return
    typer.echo(f"{installation.path}: {installation.state}; {_STATES[installation.state]}.")
    if changed:
        typer.echo("Start TorchServe again: what runs now has the old classes.")
    elif installation.state in ("faulty", "outdated") and not undo:
        typer.echo(f"Patch it: {COMMAND}")
