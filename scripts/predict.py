"""Asks a served model, and shows its answer: a table for labels, entities and the like, JSON for the rest.

python scripts/predict.py bert "Ada Lovelace lived in London."
python scripts/predict.py qa '{"question": "Where?", "context": "Ada lived in London."}'
python scripts/predict.py zero "A text" --parameters '{"candidate_labels": ["travel", "sleep"]}'
python scripts/predict.py cats cat.jpg
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

# Longest list of numbers that is shown whole.
_FEW = 8


def main(
    model: Annotated[str, typer.Argument(help="The model's name in TorchServe.")],
    content: Annotated[str, typer.Argument(help="A file, a text, or JSON.")],
    parameters: Annotated[str, typer.Option(help="The task's parameters, as a JSON object.")] = "",
    url: Annotated[str, typer.Option(help="TorchServe's inference address.")] = "http://127.0.0.1:8080",
    timeout: Annotated[float, typer.Option(help="Longest wait for the answer, in seconds.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as it came.")] = False,
) -> None:
    """Ask a served model.

    Examples: predict.py bert "A text"; predict.py cats cat.jpg; predict.py bert texts.json --json
    """
    body, kind = _body(content, parameters)
    try:
        answer = httpx.post(f"{url}/predictions/{model}", content=body, headers={"content-type": kind}, timeout=timeout)
    except httpx.TransportError as error:
        _fail(f"{url} does not answer: {error}. Is TorchServe running? torchserve --start")
    if answer.is_error:
        _fail(f"{answer.status_code}: {_message(answer)}")
    if as_json:
        typer.echo(answer.text)
        return
    show(_value(answer), Console(highlight=False))


def _body(content: str, parameters: str) -> tuple[bytes, str]:
    """Returns what is sent, and its content type."""
    path = Path(content)
    # A text may be longer than any path.
    is_file = len(content) < 4096 and path.is_file()
    raw = path.read_bytes() if is_file else content.encode()
    try:
        value: Any = json.loads(raw)
    except ValueError:
        value = None
    if parameters:
        try:
            given = json.loads(parameters)
        except ValueError as error:
            raise typer.BadParameter(f"is not JSON: {error}", param_hint="--parameters") from None
        inputs = value if value is not None else raw.decode("utf-8")
        return json.dumps({"inputs": inputs, "parameters": given}).encode(), "application/json"
    if isinstance(value, (dict, list)):
        return raw, "application/json"
    return raw, "application/octet-stream"


def _value(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return answer.text


def _message(answer: httpx.Response) -> str:
    value = _value(answer)
    return str(value.get("message", value)) if isinstance(value, dict) else str(value)


def show(value: Any, console: Console) -> None:
    """Prints an answer.

    Args:
        value: The answer, parsed from JSON.
        console: Where to print.
    """
    if isinstance(value, dict) and value and all(isinstance(each, (int, float)) for each in value.values()):
        _table([{"label": name, "score": number} for name, number in value.items()], console)
    elif isinstance(value, dict):
        _table([value], console)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        _table(value, console)
    elif isinstance(value, list) and value and all(isinstance(each, (int, float)) for each in value):
        console.print(_cell(value))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            console.rule(str(number), align="left")
            show(each, console)
    else:
        console.print(_cell(value), markup=False)


def _table(rows: list[dict[str, Any]], console: Console) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*names)
    for row in rows:
        table.add_row(*(_cell(row.get(name, "")) for name in names))
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list) and len(value) > _FEW and all(isinstance(each, (int, float)) for each in value):
        return f"{len(value)} numbers: {', '.join(map(_cell, value[:_FEW]))}, ..."
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _fail(message: str) -> Any:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
