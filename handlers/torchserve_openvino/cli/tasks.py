"""`torchserve-openvino tasks`."""

import importlib.util
from typing import Annotated

import typer
from rich.table import Table

from torchserve_openvino.cli.console import print_json, stdout


def tasks(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """List the tasks: what they take and answer, and whether what they need is installed.

    Each task is a handler, for --handler and for `package --task`.

    Examples:

        torchserve-openvino tasks

        torchserve-openvino package --hf FOLDER --task token-classification
    """
    from torchserve_openvino.tasks.catalog import TASKS

    rows = []
    for task in TASKS.values():
        missing = [name for name in task.modules if importlib.util.find_spec(name) is None]
        rows.append(
            {
                "task": task.handler,
                "hugging_face": task.hub,
                "inputs": task.inputs,
                "outputs": task.outputs,
                "extra": task.extra,
                "installed": not missing,
                "missing": missing,
            }
        )
    if as_json:
        print_json(rows)
        return
    table = Table("task", "Hugging Face", "takes", "answers", "needs", title=None)
    for row in rows:
        state = "" if not row["extra"] else f"{row['extra']}: {'installed' if row['installed'] else 'missing'}"
        table.add_row(*(str(row[name]) for name in ("task", "hugging_face", "inputs", "outputs")), state)
    stdout().print(table)
