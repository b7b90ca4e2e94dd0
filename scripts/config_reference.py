"""Generates model-config/schema.json and the tables of docs/configuration.md from the declared keys.

python scripts/config_reference.py            # exit 1 if a file is not up to date
python scripts/config_reference.py --write
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from torchserve_openvino.config.reference import json_schema, markdown, option_keys, section_keys

ROOT = Path(__file__).resolve().parents[1]
SCHEMA, PAGE = ROOT / "model-config" / "schema.json", ROOT / "docs" / "configuration.md"


def generated() -> dict[Path, str]:
    """Maps each file to its expected text."""
    page = PAGE.read_text(encoding="utf-8")
    for name, keys in (("options", option_keys()), ("handler.openvino", section_keys())):
        begin, end = f"<!-- generated: {name} -->", "<!-- end -->"
        table = f"{begin}\n\n{markdown(keys)}\n\n{end}"
        page, count = re.subn(f"{re.escape(begin)}.*?{end}", lambda _, table=table: table, page, flags=re.DOTALL)
        if count != 1:
            raise typer.BadParameter(f"{PAGE.name} has {count} places for {name} instead of one: {begin} ... {end}")
    return {SCHEMA: json.dumps(json_schema(), indent=1) + "\n", PAGE: page}


def renew(files: Mapping[Path, str], *, write: bool) -> None:
    """Writes the files that differ from their expected text, or exits with 1 if there are any."""
    changed = {path: text for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text}
    for path, text in changed.items():
        if write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        typer.echo(f"{'wrote' if write else 'not up to date, use --write'}: {path.relative_to(ROOT)}")
    sys.exit(1 if changed and not write else 0)


def main(
    write: Annotated[bool, typer.Option("--write", help="Renew the files instead of comparing.")] = False,
) -> None:
    """Compares the generated files with the declared keys, or renews them."""
    renew(generated(), write=write)


if __name__ == "__main__":
    typer.run(main)
