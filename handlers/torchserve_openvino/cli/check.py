"""`torchserve-openvino check FILE`."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.table import Table
from rich.text import Text

from torchserve_openvino.cli.console import fail, print_json, stdout
from torchserve_openvino.errors import ConfigError, FrontendError, ModelLoadError, PackagingError

if TYPE_CHECKING:
    from torchserve_openvino.packaging.check_archive import Checked


def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A model-config.yaml, or a model archive (.mar).", show_default=False)
    ],
    show_all: Annotated[bool, typer.Option("--all", help="Show every setting, not only those that are set.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every setting.")] = False,
    no_device_check: Annotated[
        bool,
        typer.Option(
            "--no-device-check",
            help="Accept devices that this machine lacks, e.g. to check a GPU's configuration on a laptop.",
        ),
    ] = False,
) -> None:
    """Validate a model-config.yaml, or a whole archive, and print what is set in it or by the environment.

    Exit code 0 if it is valid, 1 otherwise: every problem is reported with its
    key, its line and the nearest valid name. What is valid but implausible on
    this machine is a warning. For an archive, the handler, the model file, what
    they import, the weights and the files that the configuration names are
    checked as well; none of its code is run.

    Examples:

        torchserve-openvino check model-config.yaml

        torchserve-openvino check model-store/net.mar

        torchserve-openvino check model-config.yaml --all

        torchserve-openvino check gpu.yaml --no-device-check

        torchserve-openvino check model-config.yaml --json | jq .settings
    """
    from torchserve_openvino.config import load_serving_config
    from torchserve_openvino.packaging.check_archive import check_archive, implausible, refused_cache

    warnings: list[str] = []
    try:
        if zipfile.is_zipfile(file):
            checked = check_archive(file, check_device=not no_device_check)
            if checked.problems:
                _refuse_archive(file, checked, as_json)
            config = checked.config
            warnings += checked.warnings
        else:
            config = load_serving_config(file, check_device=not no_device_check)
            if not no_device_check and (refusal := refused_cache(config)) is not None:
                _refuse(file, f"{file}: {refusal}", [_sentence(refusal)], as_json)
    except ConfigError as error:
        _refuse(file, str(error), [_plain(problem) for problem in _all(error)], as_json)
    except (ModelLoadError, PackagingError) as error:
        _refuse(file, f"{file}: {error}", [_sentence(str(error))], as_json)
    notes = _notes(config.torchserve)
    warnings += [] if no_device_check else implausible(config)
    if as_json:
        settings = config.summary
        print_json({"ok": True, "file": str(file), "settings": settings, "notes": notes, "warnings": warnings})
        return
    rows = [row for row in config.effective() if show_all or row.source != "default"]
    table = Table("setting", "value", "source", title=Text(f"{file}: valid"), title_justify="left")
    table.columns[0].no_wrap = True
    for row in rows:
        # Dim the defaults: the values that were set matter more.
        style = "dim" if row.source == "default" else ""
        table.add_row(Text(row.key), Text(_shown(row.value)), Text(row.source), style=style)
    console = stdout()
    if rows:
        console.print(table)
    else:
        console.print(f"{file}: valid")
    if not show_all:
        console.print("All other settings have their defaults; --all shows them.")
    for warning in warnings:
        console.print(f"warning: {warning}")
    if config.handler:
        console.print(f"Your handler's own settings, kept as they are: {', '.join(map(str, config.handler))}")
    for note in notes:
        console.print(note)


def _notes(keys: Mapping[str, Any]) -> list[str]:
    """Returns what is valid, and dangerous with the TorchServe of this machine."""
    from torchserve_openvino.frontend import COMMAND, Frontend

    try:
        if not keys.get("asyncCommunication") or Frontend.installed().state not in ("faulty", "outdated"):
            return []
    except FrontendError:
        # The archive may be made where TorchServe is not installed.
        return []
    return [f"asyncCommunication: TorchServe as it is installed here may lose all requests of a model. Run: {COMMAND}"]


def _refuse(file: Path, text: str, problems: list[dict[str, Any]], as_json: bool) -> NoReturn:
    if as_json:
        print_json({"ok": False, "file": str(file), "problems": problems})
        raise typer.Exit(1)
    fail(text)


def _refuse_archive(file: Path, checked: "Checked", as_json: bool) -> NoReturn:
    text = "\n  ".join([f"{file}: a worker would not serve it:", *(f"- {problem}" for problem in checked.problems)])
    others = checked.problems[len(checked.config_errors) :]
    _refuse(file, text, [*map(_plain, checked.config_errors), *map(_sentence, others)], as_json)


def _sentence(text: str) -> dict[str, Any]:
    return {"type": "PackagingError", "message": text}


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
        "place": error.location,
        "message": error.message,
        "suggestion": error.suggestion,
    }
