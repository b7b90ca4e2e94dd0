"""`torchserve-openvino init`."""

from pathlib import Path
from typing import Annotated

import typer

from torchserve_openvino.cli.console import fail, print_json
from torchserve_openvino.config.spelling import listed, nearest
from torchserve_openvino.errors import ConfigError, PackagingError


def init(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where to write.")] = Path(),
    task: Annotated[str, typer.Option(help="text, or a name from `torchserve-openvino tasks`.")] = "tensor",
    config: Annotated[
        str | None,
        typer.Option(help="Template to start from: cpu-latency, cpu-throughput, gpu, strict ...", show_default=False),
    ] = None,
    sample: Annotated[
        Path | None,
        typer.Option(
            help="A request of tensors (.npy, .json) from which the model's inputs are declared.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite existing files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Write the files of a new model: model-config.yaml, schema.json, config.properties, metrics.yaml, model-store/.

    With --sample the inputs are declared, so that everything is compiled and
    verified before the worker is READY.

    Examples:

        torchserve-openvino init cats --task image_classifier

        torchserve-openvino init regressor --sample request.npy

        torchserve-openvino init encoder --task text --sample tokens.json
    """
    import yaml

    from torchserve_openvino.config import load_serving_config
    from torchserve_openvino.packaging import starter

    known = starter.TASKS.get(task.replace("-", "_"))
    if known is None:
        fail(f"unknown task {task!r}; valid tasks: {listed(starter.TASKS)}.{_hint(task, starter.TASKS)}")
    ready = starter.templates()
    name = config or known
    if name not in ready:
        fail(f"unknown configuration {name!r}; valid names: {listed(ready)}.{_hint(name, ready)}")
    try:
        text = ready[name].read_text(encoding="utf-8")
        if sample is not None:
            text = starter.with_inputs(text, starter.inputs_of_sample(sample.read_bytes(), text=task == "text"))
        load_serving_config(yaml.safe_load(text), check_device=False)
        written = starter.write(folder, text, force=force)
    except PackagingError as error:
        fail(str(error))
    except ConfigError as error:
        fail(f"{name} does not fit this sample; write model-config.yaml by hand: {error}")
    if as_json:
        print_json({"written": [str(path) for path in written], "config": name})
        return
    for path in written:
        typer.echo(f"wrote {path}")
    typer.echo(f"next: torchserve-openvino check {folder / 'model-config.yaml'}")


def _hint(name: str, known: dict[str, str] | dict[str, Path]) -> str:
    near = nearest(name, known)
    return f" Did you mean {near!r}?" if near else ""
