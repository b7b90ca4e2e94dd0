"""Generates docs/schemas/TASK.json, the JSON schema of each task's requests and answers, from the tasks' own models.

python scripts/task_schemas.py            # exit 1 if a file is not up to date
python scripts/task_schemas.py --write
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from config_reference import ROOT, renew
from torchserve_openvino.cli.handler_path import handlers
from torchserve_openvino.tasks.catalog import TASKS
from torchserve_openvino.tasks.forms import schema_of

FOLDER = ROOT / "docs" / "schemas"


def handler_of(task: str) -> Any:
    """Returns the class of a task's entrypoint."""
    path = handlers()[task]
    module = importlib.import_module(f"torchserve_openvino.entrypoints.{path.parent.name}.{task}")
    (model,) = [member for member in vars(module).values() if getattr(member, "__module__", "") == module.__name__]
    return model


def generated() -> dict[Path, str]:
    """Maps each file to its expected text."""
    return {
        FOLDER / f"{task.handler}.json": json.dumps(schema_of(handler_of(task.handler)), indent=1) + "\n"
        for task in TASKS.values()
        if task.loader
    }


def main(
    write: Annotated[bool, typer.Option("--write", help="Renew the files instead of comparing.")] = False,
) -> None:
    """Compares the schemas with the tasks' models, or renews them."""
    renew(generated(), write=write)


if __name__ == "__main__":
    typer.run(main)
