"""Prints answers: a table for labels, entities and the like, JSON for the rest."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

# Longest list of numbers that is shown whole.
_FEW = 8
# Longest text in a cell; a picture as base64 has a hundred thousand characters.
_LONG = 200


def show(value: Any, console: Console) -> None:
    """Prints an answer.

    Args:
        value: The answer, parsed from JSON.
        console: Where to print.
    """
    if isinstance(value, dict) and value and all(_is_number(item) for item in value.values()):
        table([{"label": name, "score": number} for name, number in value.items()], console)
    elif isinstance(value, dict):
        table([value], console)
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        table(value, console)
    elif isinstance(value, list) and value and all(_is_number(item) for item in value):
        console.print(_cell(value))
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            console.rule(str(number), align="left")
            show(item, console)
    else:
        console.print(_cell(value), markup=False)


def table(rows: list[dict[str, Any]], console: Console) -> None:
    """Prints one line for each of some objects."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    rich_table = Table(*names)
    for row in rows:
        rich_table.add_row(*(_escaped(_cell(row.get(name, ""))) for name in names))
    console.print(rich_table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list) and all(_is_number(item) for item in value) and value:
        shown = ", ".join(map(_cell, value[:_FEW]))
        return f"{len(value)} numbers: {shown}, ..." if len(value) > _FEW else f"[{shown}]"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONG else f"{text[:_LONG]}... ({len(text)} characters)"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _escaped(text: str) -> str:
    # A label such as [MASK] is no markup.
    return text.replace("[", r"\[")
