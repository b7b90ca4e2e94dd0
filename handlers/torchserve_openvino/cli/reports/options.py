"""Options that several commands about a served model share."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_MANAGEMENT = "http://127.0.0.1:8081"

Name = Annotated[str, typer.Argument(metavar="NAME", help="A model's name, or NAME/VERSION.", show_default=False)]
Management = Annotated[str, typer.Option(help="Address of TorchServe's management API.")]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="TORCHSERVE_MANAGEMENT_TOKEN",
        help="Management key, if the server requires one (in its key_file.json).",
        show_default=False,
    ),
]
Logs = Annotated[
    Path | None,
    typer.Option(help="TorchServe's log folder; by default LOG_LOCATION, else ./logs.", show_default=False),
]
