"""`torchserve-openvino handler-path NAME`."""

import ast
from pathlib import Path
from typing import Annotated

import typer

from torchserve_openvino.cli.console import fail
from torchserve_openvino.config.spelling import listed, nearest


def handler_path(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A handler, e.g. image_classifier.", show_default=False),
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the handlers, one line each.")] = False,
) -> None:
    """Print the path of a handler's file, for torch-model-archiver --handler.

    Without a name it lists the handlers.

    Examples:

        torchserve-openvino handler-path

        torch-model-archiver --handler "$(torchserve-openvino handler-path tensor)" ...
    """
    paths = handlers()
    if name is None or list_all:
        width = max((len(name) for name in paths), default=0)
        for task, path in paths.items():
            typer.echo(f"{task:<{width}}  {describe(path)}".rstrip())
        return
    chosen = paths.get(name.removesuffix(".py").replace("-", "_"))
    if chosen is None:
        near = nearest(name, paths)
        hint = f" Did you mean {near!r}?" if near else ""
        fail(f"unknown handler {name!r}; valid names: {listed(paths)}.{hint}")
    typer.echo(str(chosen))


def handlers() -> dict[str, Path]:
    """Returns each handler's file by its name."""
    # List the files, do not import them: TorchServe need not be installed where an archive is made.
    folder = Path(__file__).resolve().parent.parent / "entrypoints"
    return {path.stem: path for path in sorted(folder.rglob("[!_]*.py"), key=lambda path: path.stem)}


def describe(path: Path) -> str:
    """Returns the first line of a file's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]
