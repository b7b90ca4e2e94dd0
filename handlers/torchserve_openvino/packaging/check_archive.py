"""Finds what a worker would refuse in an archive, without running any of its code."""

import ast
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from torchserve_openvino.cache.storage.directory import open_root
from torchserve_openvino.cache.storage.remote import is_remote
from torchserve_openvino.config import ConfigErrors, ServingConfig, load_serving_config
from torchserve_openvino.config.fields import is_handler_file
from torchserve_openvino.config.sections.openvino_section import WeightsSection
from torchserve_openvino.errors import CacheDirectoryError, ConfigError, ModelLoadError
from torchserve_openvino.generation.text.exporting.weights import format_of
from torchserve_openvino.packaging.archive import extract
from torchserve_openvino.packaging.tuned import tuned_elsewhere
from torchserve_openvino.quantized.scheme import scheme_of
from torchserve_openvino.serving.loading.archive_manifest import has_f32, model_of, not_quantized
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
                problems += [str(error).replace(f"{folder}{os.sep}", "") for error in errors]
        else:
            problems.append(f"its configuration {name} is missing; package it with --config-file")
    problems += _handler(folder, model)
    warnings = [*_outside(folder, model, config), *(tuned_elsewhere(folder) if check_device else ())]
    problems += _model(folder, model, config, warnings)
    problems += _imports(folder, model, config)
    if not errors:
        problems += _pretrained(folder, model, config)
        problems += _named(folder, config)
        problems += filter(None, [refused_cache(config) if check_device else None])
    return Checked(config, problems, errors, warnings)


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
    entry = function or "handle"
    if entry not in set(_names(tree)) and len(classes) != 1:
        names = ", ".join(classes) or "none"
        yield (
            f"the handler {path} must define exactly one class of its own, or a function {entry}; found {names}. "
            f"{one_class_advice(path, classes)}"
        )


def _names(tree: ast.Module) -> Iterator[str]:
    """Yields the names that a module defines at its top: functions, imports and assignments."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


def _outside(folder: Path, model: Mapping[str, Any], config: ServingConfig) -> Iterator[str]:
    """Yields what a worker takes, but serves without this package or without weights."""
    name = str(model.get("handler", "")).partition(":")[0]
    if not _uses_this_package(folder, name):
        yield (
            f"the handler {name or 'none'} is not one of this package's: TorchServe runs the model in eager PyTorch, "
            'and `serve` refuses it. Package it with --handler "$(torchserve-openvino handler-path tensor)"; a '
            "handler of your own goes under handler.openvino.wrap"
        )
    task = TASKS.get(name.removesuffix(".py"))
    if task is None or task.loader or config.openvino.wrap is not None or model.get("serializedFile"):
        # The handler loads the model itself, or there are weights.
        return
    if not model.get("modelFile"):
        yield "it has neither a model file nor weights (--model-file, --serialized-file)"
    else:
        yield "it has no weights (--serialized-file): the model is served with those that its class sets, maybe random"


def _uses_this_package(folder: Path, handler: str) -> bool:
    """Returns True if a handler, or a file of the archive that it imports, imports this package."""
    waiting = [handler] if handler.endswith(".py") else []
    for name in waiting:
        tree = parse_source(folder / name)
        if isinstance(tree, str):
            # Of a handler that can't be read, `_handler` says so.
            if name == handler:
                return True
            continue
        for module in (module for node in ast.walk(tree) for module in _modules(node)):
            if module.partition(".")[0] == "torchserve_openvino":
                return True
            inside = _file_in(folder, module)
            if inside is not None and inside not in waiting:
                waiting.append(inside)
    return False


def _model(folder: Path, model: Mapping[str, Any], config: ServingConfig, warnings: list[str]) -> Iterator[str]:
    from torchserve_openvino.serving.loading.files import not_one_class

    code, weights = model.get("modelFile"), model.get("serializedFile")
    if code:
        tree = parse_source(folder / code)
        if isinstance(tree, str):
            yield f"the model file {code} {tree}"
        elif len(classes := _classes(tree)) != 1:
            yield f"the model file {not_one_class(code, classes)}"
    if weights:
        own = _loads_by_itself(folder, model, config)
        yield from _weights(folder / weights, bool(code), own, config.openvino.weights, warnings)


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
            # Its weights are in the quantized model.
            return
        scheme = scheme_of(read_config(hub_folder(folder)))
        if task.handler == "text_generator":
            format_of(config.openvino.generate, scheme)
    except (ModelLoadError, ConfigError) as error:
        yield str(error).removesuffix(".")


def _loads_by_itself(folder: Path, model: Mapping[str, Any], config: ServingConfig) -> bool:
    """Returns True if other code than this package's may read the weights: the handler's, or that of its bases."""
    name = str(model.get("handler", "")).partition(":")[0]
    tree = parse_source(folder / name) if name.endswith(".py") else ""
    if config.openvino.wrap is not None or isinstance(tree, str):
        return True
    ours = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torchserve_openvino"
        for alias in node.names
    }
    bases = [ast.unparse(base) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return not ours.issuperset(bases) or not functions.isdisjoint({"initialize", "_load_pickled_model"})


def _weights(path: Path, has_class: bool, own: bool, section: WeightsSection, warnings: list[str]) -> Iterator[str]:
    """Yields what is wrong with a file of weights.

    Args:
        path: The file.
        has_class: Whether the model's class is in the archive.
        own: Whether the archive's own code reads the file.
        section: Where the file has the weights.
        warnings: Gets a sentence if the names of weights have a prefix that the model's own hardly have.
    """
    from torchserve_openvino.serving.loading.exported_program import check_exported
    from torchserve_openvino.serving.loading.files import archive_kind, exported_beside_class, read_state
    from torchserve_openvino.serving.loading.select_state import select_state, wrapper_prefix
    from torchserve_openvino.serving.loading.torchscript import check_torchscript

    if not path.is_file():
        yield f"the weights {path.name} are missing"
        return
    if path.stat().st_size == 0:
        yield f"the weights {path.name} are empty"
        return
    try:
        kind = archive_kind(path)
    except ModelLoadError as error:
        yield str(error).removesuffix(".")
        return
    try:
        if kind == "torchscript":
            check_torchscript(path)
        if kind == "exported" and has_class:
            yield exported_beside_class(path)
        elif kind == "exported":
            check_exported(path)
        elif has_class and (section.model_fields_set or not own):
            state = select_state(read_state(path, mapped=True), section, path.name)
            if not section.model_fields_set and (prefix := wrapper_prefix(state)) is not None:
                warnings.append(
                    f"all names in {path.name} begin with {prefix!r}, which DataParallel and torch.compile add: unless "
                    f'the model\'s own do, set handler.openvino.weights: {{strip_prefix: "{prefix}"}}'
                )
    except ModelLoadError as error:
        yield str(error).removesuffix(".")


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


# --- finds settings that are valid but make no sense on this machine, or together ---------------------------------


# What TorchServe takes where the YAML names none.
_BATCH_SIZE, _WORKERS, _QUEUE = 1, 1, 100


def implausible(config: ServingConfig) -> Iterator[str]:
    """Yields a sentence for each setting that a worker takes, but that was probably not meant.

    Args:
        config: The settings.
    """
    # Imported here: it imports torch.
    from torchserve_openvino.serving.threads import usable_cores

    keys, section, cores = config.torchserve, config.openvino, usable_cores()
    batch = int(keys.get("batchSize", _BATCH_SIZE))
    workers = int(keys.get("maxWorkers", keys.get("minWorkers", _WORKERS)))
    queue = int(keys.get("jobQueueSize", _QUEUE))
    if isinstance(section.threads, int) and section.threads * workers > cores:
        times = f" for each of {workers} workers" if workers > 1 else ""
        yield (
            f"handler.openvino.threads is {section.threads}{times}, but this machine lets a process use {cores} "
            "core(s): they would wait for each other; set auto"
        )
    options = config.backend.options.config if config.backend is not None else {}
    for name in ("INFERENCE_NUM_THREADS", "NUM_STREAMS"):
        value = str(options.get(name, ""))
        if value.isdecimal() and int(value) > cores:
            yield f"{name} is {value}, but this machine lets a process use {cores} core(s)"
    for key, sizes in (
        ("warmup.batch_sizes", section.warmup.batch_sizes),
        ("batching.buckets", section.batching.buckets),
    ):
        if sizes == "auto":
            continue
        if min(sizes) > 1 and batch == 1:
            yield (
                f"handler.openvino.{key} is {sizes}, but batchSize is 1: each request with one item is padded to "
                f"{min(sizes)}; raise batchSize, or add 1"
            )
        elif max(sizes) > batch:
            yield (
                f"handler.openvino.{key} has {max(sizes)}, but batchSize is {batch}: only a request with several items "
                "fills such a batch, and it takes time and memory at start; raise batchSize, or remove it"
            )
    if queue < batch * workers:
        yield (
            f"jobQueueSize is {queue}, less than the {batch * workers} requests that {workers} worker(s) with "
            f"batchSize {batch} take at once: batches stay small, and requests get 503"
        )


def refused_cache(config: ServingConfig) -> str | None:
    """Returns why a worker would refuse the cache folder; None if it would not, or if there is none yet."""
    options = config.backend.options if config.backend is not None else None
    if options is None or not options.model_caching or not options.cache_dir or is_remote(options.cache_dir):
        return None
    try:
        open_root(Path(options.cache_dir), writable=False)
    except CacheDirectoryError as error:
        return f"pt2.compile.options.cache_dir: {error}"
    return None


# --- finds the modules that the Python files of an archive import and that a worker would not find ----------------


# Far above any source file; to parse it takes some hundred times as much memory.
_MAX_SOURCE_BYTES = 8 * 2**20


def missing_imports(folder: Path, starts: Iterable[str]) -> Iterator[str]:
    """Yields a sentence for each import that fails, without running any code.

    Imports in functions, in ``try`` and in ``if`` are left out: those may never run, or may be allowed to fail.

    Args:
        folder: The unpacked archive.
        starts: Names of the files that a worker imports first; files of the archive that they import are read, too.
    """
    waiting = list(dict.fromkeys(starts))
    seen = set(waiting)
    while waiting:
        name = waiting.pop(0)
        tree = parse_source(folder / name)
        # Whoever needs this file says what is wrong with it.
        for node in tree.body if isinstance(tree, ast.Module) else ():
            if isinstance(node, ast.ImportFrom) and node.level and "/" not in name:
                yield (
                    f"{name}, line {node.lineno}: relative imports fail in a model archive, whose files are not in a "
                    f"package; write `from {node.module or 'module'} import ...`"
                )
                continue
            for module in _modules(node):
                inside = _file_in(folder, module)
                if inside is not None:
                    if inside not in seen:
                        seen.add(inside)
                        waiting.append(inside)
                elif not _is_installed(module.partition(".")[0]):
                    yield (
                        f"{name}, line {node.lineno}: imports {module}, which is neither in the archive nor installed "
                        f"here; package {module.partition('.')[0]}.py with --extra-files, or name what has to be "
                        "installed with --requirements-file"
                    )


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def _file_in(folder: Path, module: str) -> str | None:
    """Returns the archive's file for a module, relative to the folder; None if the archive does not contain it."""
    parts = module.split(".")
    root = folder / parts[0]
    if root.is_dir() and any(root.rglob("*.py")):
        path = folder.joinpath(*parts)
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        return file.relative_to(folder).as_posix()
    return f"{parts[0]}.py" if (folder / f"{parts[0]}.py").is_file() else None


def _is_installed(name: str) -> bool:
    """Returns True if a worker finds a module; the current folder, where the archive is made, does not count."""
    if name in sys.stdlib_module_names or name in sys.builtin_module_names:
        return True
    current = Path.cwd()
    paths = [path for path in sys.path if path and Path(path).resolve() != current]
    for finder in sys.meta_path:
        spec = finder.find_spec(name, paths if finder is PathFinder else None)
        if spec is not None:
            return True
    return False


def parse_source(path: Path) -> ast.Module | str:
    """Returns a Python file's syntax tree, or what is wrong with it."""
    if not path.is_file():
        return "is not in the archive"
    if (size := path.stat().st_size) > _MAX_SOURCE_BYTES:
        return f"has {size} bytes, more than {_MAX_SOURCE_BYTES}, and is no Python file"
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (RecursionError, MemoryError):
        return "is nested too deeply for Python"
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        return f"is not valid Python: {error}"
