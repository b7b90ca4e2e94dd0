"""`torchserve-openvino frontend`."""

from pathlib import Path
from typing import Annotated

import typer

from torchserve_openvino.cli.console import fail, print_json
from torchserve_openvino.errors import FrontendError

_STATES = {
    "faulty": "it loses requests of models with asyncCommunication: true",
    "mended": "requests of models with asyncCommunication: true are safe",
    "unknown": "its version is not TorchServe 0.12.0",
}


def frontend(
    mend: Annotated[bool, typer.Option("--mend", help="Mend it in place.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Put TorchServe's own classes back.")] = False,
    jar: Annotated[
        Path | None,
        typer.Option(help="The archive; by default model-server.jar of the installed torchserve.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show whether TorchServe's Java frontend loses requests, and mend it.

    With asyncCommunication: true, as in the template for text generation, the
    frontend of TorchServe 0.12.0 changes a map from two threads. In the end it
    loses a request, and with it the worker and all requests that it holds. It
    also never answers the requests of a worker that dies, nor lets a new one
    start while others come. --mend replaces two classes in model-server.jar,
    which keeps the old ones for --undo. Start TorchServe again afterwards.

    Examples:

        torchserve-openvino frontend

        torchserve-openvino frontend --mend

        torchserve-openvino frontend --undo
    """
    from torchserve_openvino.frontend import COMMAND, Frontend

    if mend and undo:
        fail("--mend and --undo exclude each other.")
    try:
        found = Frontend(jar) if jar is not None else Frontend.installed()
        changed = (mend and found.mend()) or (undo and found.undo())
    except FrontendError as error:
        fail(str(error))
    if as_json:
        print_json({"path": str(found.path), "state": found.state, "changed": changed})
        return
    typer.echo(f"{found.path}: {found.state}; {_STATES[found.state]}.")
    if changed:
        typer.echo("Start TorchServe again: what runs now has the old classes.")
    elif found.state == "faulty" and not undo:
        typer.echo(f"Mend it: {COMMAND}")
