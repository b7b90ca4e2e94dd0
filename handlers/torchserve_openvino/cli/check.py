"""`torchserve-openvino check FILE`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from torchserve_openvino.cli.console import fail, print_json, stdout
from torchserve_openvino.errors import ConfigError


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A model-config.yaml.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    no_device_check: Annotated[
        bool,
        typer.Option(
            "--no-device-check",
            help="Accept devices that this machine lacks, e.g. to check a GPU's configuration on a laptop.",
        ),
    ] = False,
) -> None:
    """Validate a model-config.yaml and print each effective value with its source.

    Exit code 0 if it is valid, 1 otherwise: every problem is told with its
    key, its line and the nearest valid name.

    Examples:

        torchserve-openvino check model-config.yaml

        torchserve-openvino check gpu.yaml --no-device-check

        torchserve-openvino check model-config.yaml --json | jq .settings
    """
    from torchserve_openvino.config import load_serving_config

    try:
        config = load_serving_config(file, check_device=not no_device_check)
    except ConfigError as error:
        if as_json:
            print_json({"ok": False, "file": str(file), "problems": [_plain(each) for each in _all(error)]})
            raise typer.Exit(1) from error
        fail(str(error))
    if as_json:
        print_json({"ok": True, "file": str(file), "settings": config.summary})
        return
    table = Table("setting", "value", "source", title=Text(f"{file}: valid"), title_justify="left")
    table.columns[0].no_wrap = True
    for row in config.effective():
        # A default is the less interesting half of the table.
        style = "dim" if row.source == "default" else ""
        table.add_row(Text(row.key), Text(_shown(row.value)), Text(row.source), style=style)
    console = stdout()
    console.print(table)
    if config.handler:
        console.print(f"Your handler's own settings, kept as they are: {', '.join(map(str, config.handler))}")


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "-" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _all(error: ConfigError) -> tuple[ConfigError, ...]:
    return getattr(error, "problems", (error,))


def _plain(error: ConfigError) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "key": error.key,
        "place": error.place,
        "message": error.message,
        "suggestion": error.suggestion,
    }
