"""Starter files for a new model: model-config.yaml with its schema, TorchServe's config.properties, metrics.yaml."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from torchserve_openvino.errors import ItemError, PackagingError
from torchserve_openvino.tasks import catalog

# Task, named after its handler, to the configuration to start from. The handler tensor or a custom one serves `text`.
TASKS = {**{task.handler: task.template for task in catalog.TASKS.values()}, "text": "cpu-text"}
# Name of the variable dimension of a text model in model-config/cpu-text.yaml.
_LENGTH = "sequence"

CONFIG_PROPERTIES = """\
# torchserve --start --ncs --ts-config config.properties --models NAME=NAME.mar --disable-token-auth
inference_address=http://127.0.0.1:8080
management_address=http://127.0.0.1:8081
metrics_address=http://127.0.0.1:8082
model_store=model-store
metrics_mode=prometheus
metrics_config={metrics}
# TorchServe's own limits in bytes, below those of model-config.yaml; larger requests and answers fail.
# max_request_size=6553500
# max_response_size=6553500
# Requests that may wait for each model unless its model-config.yaml has a jobQueueSize; further ones get 503.
# job_queue_size=100
"""


def template_folder() -> Path:
    """Returns the folder of the ready-made configurations, in the installed package or in its source tree."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "templates"
    return installed if installed.is_dir() else package.parents[1] / "model-config"


def templates() -> dict[str, Path]:
    """Returns the name and path of each ready-made model-config.yaml."""
    files = sorted(template_folder().glob("*.yaml"))
    return {path.stem: path for path in files if path.stem != "metrics"}


def inputs_of_sample(body: bytes, *, text: bool) -> list[dict[str, Any]]:
    """Derives a model's inputs from a sample request, as ``handler.openvino.warmup.inputs`` declares them.

    Args:
        body: A request's body: .npy, or JSON of nested lists, of named inputs, or of KServe v2. Its first dimension is
            the batch.
        text: Whether integer inputs of one dimension vary in length.

    Raises:
        PackagingError: The body has none of these formats.
    """
    from torchserve_openvino.tasks.tensors import parse

    try:
        request = parse(body, len(body) * 64 + 1024)
    except ItemError as error:
        raise PackagingError(f"the sample is not a request of tensors: {error}") from error
    named = [(None, tensor) for tensor in request.positional] + list(request.named.items())
    return [_declared(name, tensor, text=text) for name, tensor in named]


def _declared(name: str | None, tensor: Any, *, text: bool) -> dict[str, Any]:
    from torchserve_openvino.serving.shapes.input_spec import declaration_of

    declaration = declaration_of(name, tensor)
    if text and len(declaration["shape"]) == 1 and not tensor.is_floating_point():
        declaration["shape"] = [_LENGTH]
    if name and "mask" in name and declaration["shape"]:
        declaration["mask"] = True
    return declaration


def with_inputs(template: str, inputs: Sequence[Mapping[str, Any]]) -> str:
    """Returns a configuration's text with these inputs declared, in place of its own section ``warmup``."""
    lines: list[str] = []
    skipping = False
    for line in template.splitlines():
        if line.startswith(("    warmup:", "    # warmup:")):
            skipping = True
        elif skipping and not line.startswith(("      ", "    #  ")):
            skipping = False
        if not skipping:
            lines.append(line)
        if line.rstrip() == "  openvino:":
            lines += ["    warmup:", "      inputs:"]
            lines += [f"        - {_flow(spec)}" for spec in inputs]
    return "\n".join(lines) + "\n"


def _flow(value: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(value), default_flow_style=True, sort_keys=False, width=200).strip()


def write(folder: Path, config: str, *, force: bool) -> list[Path]:
    """Writes the files and the model store's folder.

    Args:
        folder: Target folder; created if absent.
        config: Text of model-config.yaml.
        force: Whether to replace existing files.

    Raises:
        PackagingError: A file exists and `force` is false (nothing is written then), or a file cannot be written.
    """
    metrics = folder / "metrics.yaml"
    contents = {
        folder / "model-config.yaml": config,
        folder / "config.properties": CONFIG_PROPERTIES.format(metrics=metrics.resolve()),
        metrics: (template_folder() / metrics.name).read_text(encoding="utf-8"),
        folder / "schema.json": (template_folder() / "schema.json").read_text(encoding="utf-8"),
    }
    existing = [path for path in contents if path.exists()]
    if existing and not force:
        raise PackagingError(f"{', '.join(map(str, existing))} are there already; --force replaces them.")
    try:
        (folder / "model-store").mkdir(parents=True, exist_ok=True)
        for path, text in contents.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PackagingError(f"{folder} cannot be written: {error.strerror or error}.") from error
    return list(contents)
