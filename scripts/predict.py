"""Asks a served model, and shows its answer: a table, and a picture for what is found in photos.

python scripts/predict.py bert "Ada Lovelace lived in London."
python scripts/predict.py detr street.jpg --out boxes.png
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from PIL import Image, UnidentifiedImageError
from rich.console import Console

from answers.pictures import drawn
from answers.tables import show, table


def main(
    model: Annotated[str, typer.Argument(help="The model's name in TorchServe.")],
    content: Annotated[str, typer.Argument(help="A file, a text, or JSON.")],
    parameters: Annotated[str, typer.Option(help="The task's parameters, as a JSON object.")] = "",
    url: Annotated[str, typer.Option(help="TorchServe's inference address.")] = "http://127.0.0.1:8080",
    timeout: Annotated[float, typer.Option(help="Longest wait for the answer, in seconds.")] = 60.0,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the drawn picture.", show_default="PHOTO-MODEL.png beside the photo"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as it came.")] = False,
) -> None:
    """Ask a served model, and show its answer.

    A table shows labels, entities, spans and the like. Boxes, the class of each pixel, and depth are drawn over the
    photo, too.

    Examples:

        predict.py bert "Ada Lovelace lived in London."

        predict.py qa '{"question": "Where?", "context": "Ada lived in London."}'

        predict.py zero "A text" --parameters '{"candidate_labels": ["travel", "sleep"]}'

        predict.py detr street.jpg --out boxes.png

        predict.py segformer street.jpg --parameters '{"format": "png"}'

        predict.py bert texts.json --json

        predict.py painter "a cat" --parameters '{"seed": 7}' --out cat.png
    """
    if out is not None:
        _check_out(out, content)
    body, kind = _body(content, parameters)
    try:
        answer = httpx.post(f"{url}/predictions/{model}", content=body, headers={"content-type": kind}, timeout=timeout)
    except httpx.TransportError as error:
        _fail(f"{url} does not answer: {error}. Is TorchServe running? torchserve --start")
    if answer.is_error:
        _fail(f"{answer.status_code}: {_message(answer)}")
    if answer.headers.get("content-type") == "image/png":
        if as_json:
            _fail('the answer is a picture; ask for JSON by --parameters \'{"response_format": "b64_json"}\'')
        _save(answer.content, out or Path(f"{model.replace('/', '-')}.png"))
        return
    console = Console(highlight=False)
    value = _value(answer)
    # JSON is for programs, which get a picture only if they ask for one.
    photo = _photo(content) if out is not None or not as_json else None
    picture = drawn(value, photo) if photo is not None else None
    if as_json:
        typer.echo(answer.text)
    elif picture is None:
        show(value, console)
    else:
        table(picture[1], console)
    if picture is not None:
        # A model's version may follow its name: detr/2.0.
        path = out or Path(content).with_name(f"{Path(content).stem}-{model.replace('/', '-')}.png")
        picture[0].save(path)
        typer.echo(f"wrote {path}", err=as_json)
    elif out is not None:
        _fail(f"this answer holds nothing to draw, so {out} is not written")


def _save(picture: bytes, path: Path) -> None:
    """Writes a picture that is the whole answer, as it came where the file is to be a PNG."""
    if path.suffix.lower() == ".png":
        path.write_bytes(picture)
    else:
        Image.open(io.BytesIO(picture)).save(path)
    typer.echo(f"wrote {path}")


def _is_file(content: str) -> bool:
    # A text may be longer than any path.
    return len(content) < 4096 and Path(content).is_file()


def _check_out(out: Path, content: str) -> None:
    """Refuses a file that can't be written, or that is the input itself, before anything is asked."""
    if out.suffix.lower() not in Image.registered_extensions():
        raise typer.BadParameter(f"{out.name} has no ending of a picture, such as .png", param_hint="--out")
    if _is_file(content) and out.exists() and out.samefile(content):
        raise typer.BadParameter(f"{out} is the input itself", param_hint="--out")
    if not out.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="--out")


def _photo(content: str) -> Image.Image | None:
    """Returns the photo that was asked about; None if it was something else."""
    if not _is_file(content):
        return None
    try:
        photo = Image.open(content)
        photo.load()
    except (UnidentifiedImageError, OSError):
        return None
    return photo


def _body(content: str, parameters: str) -> tuple[bytes, str]:
    """Returns what is sent, and its content type."""
    raw = Path(content).read_bytes() if _is_file(content) else content.encode()
    try:
        value: Any = json.loads(raw)
    except ValueError:
        value = None
    if parameters:
        try:
            extra = json.loads(parameters)
        except ValueError as error:
            raise typer.BadParameter(f"is not JSON: {error}", param_hint="--parameters") from None
        inputs = value if value is not None else _text(raw)
        return json.dumps({"inputs": inputs, "parameters": extra}).encode(), "application/json"
    if isinstance(value, (dict, list)):
        return raw, "application/json"
    return raw, "application/octet-stream"


def _text(raw: bytes) -> str:
    """Returns what JSON can hold: a text itself, the bytes of a picture or a recording as base64."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return base64.b64encode(raw).decode("ascii")


def _value(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return answer.text


def _message(answer: httpx.Response) -> str:
    value = _value(answer)
    return str(value.get("message", value)) if isinstance(value, dict) else str(value)


def _fail(message: str) -> Any:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
