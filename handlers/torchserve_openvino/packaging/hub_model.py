"""Puts a model that `save_pretrained` wrote into an archive: its task, its files, a check of its weights."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchserve_openvino.config.spelling import listed, nearest
from torchserve_openvino.errors import ModelLoadError, PackagingError
from torchserve_openvino.files.contained import OutsideError, contained
from torchserve_openvino.files.json_text import read_json_object
from torchserve_openvino.generation.images.families import INDEX
from torchserve_openvino.serving.loading import hub
from torchserve_openvino.tasks.catalog import TASKS, Task, guessed, loader_of, named

_INDEX = ".index.json"
# The files with all weights of a model, the preferred one first.
_WHOLE = ("model.safetensors", "pytorch_model.bin")
# Tokenizers, processors, and what sentence-transformers adds in subfolders.
_PLAIN = (".json", ".txt", ".model", ".jinja", ".tiktoken")
# Far above any tokenizer; something else that ends in .json or .txt is not the model's.
_MAX_PLAIN_BYTES = 256 * 2**20


@dataclass(frozen=True)
class HubModel:
    """What is packaged.

    Attributes:
        folder: What `save_pretrained` wrote.
        task: The task that it is served for.
        why: How the task was found.
        files: The files that the worker reads, relative to ``folder``.
    """

    folder: Path
    task: Task
    why: str
    files: tuple[Path, ...]


def hub_model(folder: Path, task: str | None) -> HubModel:
    """Looks at a folder.

    Args:
        folder: What `save_pretrained` wrote.
        task: Name of the task, by our name or Hugging Face's; None to guess it.

    Raises:
        PackagingError: The folder holds no such model, needs code of its own, or its task can't be told.
    """
    if (folder / INDEX).is_file():
        return _pipeline(folder, task)
    try:
        config = hub.read_config(folder)
    except ModelLoadError as error:
        raise PackagingError(f"--hf: {error} model.save_pretrained(FOLDER) writes one.") from error
    if "auto_map" in config:
        raise PackagingError(
            f"--hf {folder}: config.json names code of its own (auto_map), which is never run (trust_remote_code). "
            "Package the model's class with --model-file."
        )
    chosen, why = _task(folder, config, task)
    return HubModel(folder, chosen, why, _checked(folder, _files(folder)))


def _task(folder: Path, config: dict[str, Any], name: str | None) -> tuple[Task, str]:
    known = [task.handler for task in TASKS.values() if task.loader]
    if name is not None:
        task = named(name)
        if task is TASKS["image_classifier"]:
            # Whose transforms are torchvision's; a folder has its own.
            task = TASKS["hub_image_classifier"]
        if task is None or not task.loader:
            hint = nearest(name, [*known, *(task.hub for task in TASKS.values() if task.hub)])
            raise PackagingError(
                f"unknown task {name!r}; valid tasks: {listed(known)}.{f' Did you mean {hint!r}?' if hint else ''}"
            )
        return task, "--task"
    guess = guessed(config, pools=(folder / "modules.json").is_file())
    if guess.task is None:
        raise PackagingError(f"the task of {folder} is not clear: {guess.why}. Name it: --task {listed(known)}.")
    return guess.task, guess.why


def _pipeline(folder: Path, task: str | None) -> HubModel:
    """Looks at the folder of a diffusers pipeline.

    Raises:
        PackagingError: The pipeline is not served, is not for this task, or has weights that are no safetensors.
    """
    # Imported here: it imports torch, which other models need only to be loaded.
    from torchserve_openvino.generation.images.loading import family_of, read_index

    pictures = TASKS["image_generator"]
    if task is not None and named(task) is not pictures:
        raise PackagingError(f"--hf {folder}: {INDEX} is that of a pipeline for {pictures.handler}, not for {task}.")
    try:
        index = read_index(folder)
        family_of(index)
    except ModelLoadError as error:
        raise PackagingError(f"--hf {folder}: {error}") from error
    files = [Path(INDEX)]
    for name, entry in index.items():
        if isinstance(entry, list) and entry[-1] and (folder / name).is_dir():
            files += [path.relative_to(folder) for path in sorted((folder / name).iterdir()) if _is_used(path)]
    why = "--task" if task is not None else f"the pipeline {index['_class_name']}"
    return HubModel(folder, pictures, why, _checked(folder, files))


def _checked(folder: Path, files: Iterable[Path]) -> tuple[Path, ...]:
    """Returns the files to package; none of them leads out of the folder, whose author is not the one who packages it.

    Raises:
        PackagingError: A file is a link to somewhere else, or a name leads there.
    """
    real, files = folder.resolve(), tuple(files)
    # The hub's client keeps contents by their digest, and links to them: models--OWNER--NAME/snapshots/COMMIT/FILE.
    cached = [
        parent.parent for parent in real.parents if parent.name == "snapshots" and parent.parent.name[:8] == "models--"
    ]
    for name in files:
        try:
            contained(folder, str(name), [folder_ / "blobs" for folder_ in cached])
        except OutsideError as error:
            raise PackagingError(
                f"--hf {folder}: {error}, to {(folder / name).resolve()}, which is not part of the model. If it "
                "is, copy it into the folder."
            ) from error
    return files


def _is_used(path: Path) -> bool:
    """Whether a worker reads a file of a pipeline's component: no variants such as model.fp16.safetensors."""
    if path.suffix == ".safetensors":
        return "." not in path.stem
    if ".index." in path.name:
        return path.name.endswith(f".safetensors{_INDEX}")
    return path.suffix in _PLAIN and path.is_file() and path.stat().st_size <= _MAX_PLAIN_BYTES


def _files(folder: Path) -> Iterator[Path]:
    """Yields the files that a worker reads."""
    inside = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    weights = next((names for whole in _WHOLE if (names := _weights(inside, whole))), None)
    if weights is None:
        raise PackagingError(
            f"--hf {folder}: no weights ({', '.join(_WHOLE)}, or one's shards and index): save_pretrained writes them."
        )
    yield from map(Path, weights)
    for path in inside.values():
        if path.name.endswith(_INDEX):
            continue
        if path.suffix in _PLAIN and path.stat().st_size <= _MAX_PLAIN_BYTES and not path.name.startswith("README"):
            yield path.relative_to(folder)
    try:
        modules = hub.module_folders(folder)
    except ModelLoadError as error:
        raise PackagingError(f"--hf: {error}") from error
    for name in modules:
        yield from (path.relative_to(folder) for path in sorted((folder / name).glob("*.json")))


def _weights(inside: Mapping[str, Path], whole: str) -> list[str]:
    """Returns the files with a model's weights: one for the whole of it, or shards and their index; empty without.

    As transformers' ``from_pretrained`` looks for them: copies in another precision or form may lie beside.
    """
    if whole in inside:
        return [whole]
    index = f"{whole}{_INDEX}"
    shards = sorted(_shards(inside[index]) & inside.keys()) if index in inside else []
    return [*shards, index] if shards else []


def _shards(index: Path) -> set[str]:
    """Returns the files of weights that an index names.

    Raises:
        PackagingError: It is damaged.
    """
    try:
        return set(map(str, read_json_object(index)["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise PackagingError(f"{index} is damaged: {error!r}.") from error


def check_loads(model: HubModel) -> str:
    """Loads the model as a worker does; returns its class.

    Raises:
        PackagingError: transformers is not installed, weights are missing or do not fit, or there is no tokenizer or
            whatever else prepares inputs.
    """
    loaders: dict[str, Callable[[Path], Any]] = {
        "tokenizer": hub.load_tokenizer,
        "any_tokenizer": partial(hub.load_tokenizer, fast=False),
        "image_processor": hub.load_image_processor,
        "feature_extractor": hub.load_feature_extractor,
    }
    try:
        if model.task.handler == "image_generator":
            # Imported here for the same reason as above.
            from torchserve_openvino.generation.images.loading import load

            return load(model.folder).family.modes["text"]
        loader = loader_of(model.task, hub.read_config(model.folder), sparse=hub.is_sparse(model.folder))
        loaded = hub.load_model(model.folder, loader, model.task.may_lack)
        for name in model.task.prepared_by:
            loaders[name](model.folder)
        if model.task.handler == "sentence_embedder":
            hub.pooling_of(model.folder)
    except ModelLoadError as error:
        raise PackagingError(f"{error}") from error
    return type(loaded).__name__


def put_into(archive: Path, model: HubModel) -> None:
    """Copies the model's files into an unpacked archive."""
    for name in model.files:
        target = archive / hub.FOLDER / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(model.folder / name, target)
