"""Finds what a worker would refuse in an archive, without running any of its code."""

import ast
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchserve_openvino.config import ConfigErrors, ServingConfig, load_serving_config
from torchserve_openvino.config.fields import is_handler_file
from torchserve_openvino.errors import ConfigError, ModelLoadError
from torchserve_openvino.generation.text.exporting.weight_format import format_of
from torchserve_openvino.packaging.archive import extract
from torchserve_openvino.packaging.imports import missing_imports, parse_source
from torchserve_openvino.packaging.plausibility import refused_cache
from torchserve_openvino.packaging.tuned import tuned_elsewhere
from torchserve_openvino.quantized.scheme import scheme_of
from torchserve_openvino.serving.loading.archive import has_f32, model_of, not_quantized
from torchserve_openvino.serving.loading.hub import hub_folder, read_config
from torchserve_openvino.serving.loading.labels import read_labels
from torchserve_openvino.tasks.catalog import TASKS


@dataclass
class Checked:
    """What `check_archive` found.

    Attributes:
        config: The archive's settings; the defaults where it has no model-config.yaml, or one that is not valid.
        problems: One sentence each; empty if a worker would start to load it.
        config_errors: What is wrong in model-config.yaml; also in `problems`.
        warnings: What is likely to be wrong on this machine, one sentence each.
    """

    config: ServingConfig
    problems: list[str] = field(default_factory=list)
    config_errors: tuple[ConfigError, ...] = ()
    warnings: list[str] = field(default_factory=list)


def check_archive(path: Path, *, check_device: bool) -> Checked:
    """Checks a .mar.

    Args:
        path: The archive.
        check_device: Whether a device that this machine lacks is an error.

    Raises:
        PackagingError: It is not a model archive.
    """
    with tempfile.TemporaryDirectory(prefix="torchserve-openvino-") as scratch:
        folder = Path(scratch)
        extract(path, folder)
        checked = check_folder(folder, check_device=check_device)
        if problem := not_quantized(folder, checked.config):
            checked.problems.append(problem)
        return checked


def check_folder(folder: Path, *, check_device: bool) -> Checked:
    """Checks an unpacked archive, as `check_archive` does."""
    model = model_of(folder)
    problems: list[str] = []
    config = ServingConfig()
    # The first of `found`, if there are any.
    errors: tuple[ConfigError, ...] = ()
    if name := model.get("configFile"):
        if (folder / name).is_file():
            try:
                config = _relative(load_serving_config(folder / name, check_device=check_device), folder)
            except ConfigError as error:
                # The rest is checked all the same, so that the user sees all errors at once.
                errors = error.problems if isinstance(error, ConfigErrors) else (error,)
                problems += [str(each).replace(f"{folder}{os.sep}", "") for each in errors]
        else:
            problems.append(f"its configuration {name} is missing; package it with --config-file")
    problems += _handler(folder, model)
    problems += _model(folder, model, config)
    problems += _imports(folder, model, config)
    if not errors:
        problems += _pretrained(folder, model, config)
        problems += _named(folder, config)
        problems += filter(None, [refused_cache(config) if check_device else None])
    return Checked(config, problems, errors, list(tuned_elsewhere(folder)) if check_device else [])


def _relative(config: ServingConfig, folder: Path) -> ServingConfig:
    """Returns the settings with sources relative to the archive: where that was unpacked means nothing to the user."""

    def shorter(sources: Mapping[str, str]) -> dict[str, str]:
        return {key: source.replace(f"{folder}{os.sep}", "") for key, source in sources.items()}

    backend = config.backend
    if backend is not None:
        backend = replace(backend, sources=shorter(backend.sources))
    return config.model_copy(update={"sources": shorter(config.sources), "backend": backend})


def _imports(folder: Path, model: Mapping[str, Any], config: ServingConfig) -> Iterator[str]:
    if model.get("requirementsFile"):
        # What these install has other names than what it imports as.
        return
    wrapped = config.openvino.wrap
    names = [str(model.get("handler", "")).partition(":")[0], str(model.get("modelFile") or ""), str(wrapped or "")]
    yield from missing_imports(folder, [name for name in names if name.endswith(".py") and (folder / name).is_file()])


def _handler(folder: Path, model: Mapping[str, Any]) -> Iterator[str]:
    from torchserve_openvino.serving.loading.files import one_class_advice

    name = str(model.get("handler", ""))
    path, _, function = name.partition(":")
    # A name without a file is one of TorchServe's own handlers.
    if not path.endswith(".py"):
        return
    tree = parse_source(folder / path)
    if isinstance(tree, str):
        yield f"the handler {path} {tree}"
        return
    classes = _classes(tree)
    functions = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    entry = function or "handle"
    if entry not in functions and len(classes) != 1:
        names = ", ".join(classes) or "none"
        yield (
            f"the handler {path} must define exactly one class of its own, or a function {entry}; found {names}. "
            f"{one_class_advice(path, classes)}"
        )


def _model(folder: Path, model: Mapping[str, Any], config: ServingConfig) -> Iterator[str]:
    from torchserve_openvino.serving.loading.files import not_one_class

    code, weights = model.get("modelFile"), model.get("serializedFile")
    if code:
        tree = parse_source(folder / code)
        if isinstance(tree, str):
            yield f"the model file {code} {tree}"
        elif len(classes := _classes(tree)) != 1:
            yield f"the model file {not_one_class(code, classes)}"
    if weights:
        yield from _weights(folder / weights, has_class=bool(code), config=config)


def _pretrained(folder: Path, model: Mapping[str, Any], config: ServingConfig) -> Iterator[str]:
    task = TASKS.get(str(model.get("handler", "")).removesuffix(".py"))
    if task is None or not task.loader or config.openvino.wrap is not None:
        return
    try:
        if task.handler == "image_generator":
            # Imported here: it imports torch, which this check does without.
            from torchserve_openvino.generation.images.loading import pipeline_folder

            pipeline_folder(folder)
            return
        if not has_f32(folder):
            # Its weights are in the quantised model.
            return
        scheme = scheme_of(read_config(hub_folder(folder)))
        if task.handler == "text_generator":
            format_of(config.openvino.generate, scheme)
    except (ModelLoadError, ConfigError) as error:
        yield str(error).removesuffix(".")


def _weights(path: Path, *, has_class: bool, config: ServingConfig) -> Iterator[str]:
    from torchserve_openvino.serving.loading.checkpoint import select_state
    from torchserve_openvino.serving.loading.exported_program import check_exported
    from torchserve_openvino.serving.loading.files import archive_kind, exported_beside_class, read_state
    from torchserve_openvino.serving.loading.torchscript import check_torchscript

    if not path.is_file():
        yield f"the weights {path.name} are missing"
        return
    try:
        kind = archive_kind(path)
    except ModelLoadError as error:
        yield str(error).removesuffix(".")
        return
    section = config.openvino.weights
    try:
        if kind == "torchscript":
            check_torchscript(path)
        if kind == "exported" and has_class:
            yield exported_beside_class(path)
        elif kind == "exported":
            check_exported(path)
        elif has_class and (section.key is not None or section.strip_prefix is not None):
            select_state(read_state(path), section, path.name)
    except ModelLoadError as error:
        yield str(error).removesuffix(".")
    if kind == "state_dict" and path.stat().st_size == 0:
        yield f"the weights {path.name} are empty"


def _named(folder: Path, config: ServingConfig) -> Iterator[str]:
    section = config.openvino
    wrapped = [section.wrap] if section.wrap is not None and is_handler_file(section.wrap) else []
    keys = {"warmup.samples": section.warmup.samples, "op_mappings": section.op_mappings, "wrap": wrapped}
    keys["record.scrub"] = [section.record.scrub] if section.record.scrub is not None else []
    for key, names in keys.items():
        for name in names:
            if not (folder / name).is_file():
                yield f"handler.openvino.{key} names {name!r}: it is not in the archive; package it with --extra-files"
    labels = folder / "index_to_name.json"
    if labels.is_file():
        try:
            read_labels(labels)
        except ModelLoadError as error:
            yield str(error).removesuffix(".")


def _classes(tree: ast.Module) -> list[str]:
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
