"""Makes a .mar with torch-model-archiver, unpacks it, and rewrites it so that the same content gives the same bytes."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from torchserve_openvino.cache.open import WORKERS_PREFIX
from torchserve_openvino.config.fields import is_handler_file
from torchserve_openvino.config.yaml_source import Source, openvino_section, parse_yaml, read_yaml
from torchserve_openvino.errors import ConfigError, ModelLoadError, PackagingError
from torchserve_openvino.files.atomic import AtomicFile
from torchserve_openvino.files.json_text import JsonError, parse_json, read_json_object
from torchserve_openvino.files.zip_bounds import UNREADABLE, read_member, why_no_room, why_unbounded
from torchserve_openvino.serving.loading.archive_manifest import MANIFEST, QUANTIZED_MODEL, model_of, named_files

# The earliest date that a zip file can store; it replaces the current time in everything that is packaged.
EPOCH = (1980, 1, 1, 0, 0, 0)
EPOCH_TEXT = "01/01/1980 00:00:00"


def run_archiver(arguments: Sequence[str], name: str, folder: Path) -> Path:
    """Runs torch-model-archiver.

    Args:
        arguments: Its command-line options, without name and export path.
        name: The model's name.
        folder: Where to write.

    Returns:
        Path of the archive.

    Raises:
        PackagingError: It failed; the message quotes its output.
    """
    # Its working folder is TMPDIR/name, which it deletes first: concurrent runs need separate TMPDIRs.
    with tempfile.TemporaryDirectory(prefix="torchserve-openvino-") as scratch:
        command = [sys.executable, "-m", "model_archiver.model_packaging", "--force", "--archive-format", "zip-store"]
        command += ["--model-name", name, "--export-path", str(folder), *arguments]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env={**os.environ, "TMPDIR": scratch}
        )
    path = folder / f"{name}.mar"
    if done.returncode or not path.is_file():
        output = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise PackagingError(f"torch-model-archiver failed: {output[-1] if output else f'exit code {done.returncode}'}")
    return path


def extract(path: Path, folder: Path) -> None:
    """Unpacks an archive into an empty folder, which is created if it is missing.

    Raises:
        PackagingError: It is not a valid .mar, or holds links, paths outside the archive, or too much data.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            folder.mkdir(parents=True, exist_ok=True)
            if (reason := why_unbounded(path, archive) or why_no_room(archive, folder)) is not None:
                raise PackagingError(f"{path} is not unpacked: {reason}.")
            for info in archive.infolist():
                _check_name(path, info)
                archive.extract(info, folder)
    except UNREADABLE as error:
        raise PackagingError(f"{path} cannot be read as a .mar: {error}.") from error
    if not (folder / MANIFEST).is_file():
        raise PackagingError(f"{path} has no {MANIFEST}: it was not made by torch-model-archiver.")
    try:
        model_of(folder)
    except ModelLoadError as error:
        raise PackagingError(f"{path}: {error}") from error


def read_packed_config(path: Path) -> tuple[dict[str, Any], Source]:
    """Returns the section ``model`` of an archive's manifest, and its model-config.yaml, without unpacking it.

    Raises:
        PackagingError: The file is no archive.
        ConfigError: Its model-config.yaml is not valid.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = parse_json(read_member(archive, MANIFEST))
            if not isinstance(manifest, dict):
                raise JsonError(f"{MANIFEST} must hold a JSON object")
            # No file is there: its names are checked as if they were.
            model = named_files(manifest, path.parent / path.stem)
            name = model.get("configFile")
            text = read_member(archive, name).decode("utf-8") if name else ""
    except (KeyError, ValueError, ModelLoadError, *UNREADABLE) as error:
        raise PackagingError(f"{path} cannot be read as a .mar: {error}.") from error
    return model, parse_yaml(text, str(name or path))


def _check_name(path: Path, info: zipfile.ZipInfo) -> None:
    parts = PurePosixPath(info.filename).parts
    link = (info.external_attr >> 16) & 0o170000 == 0o120000
    if info.filename.startswith("/") or ".." in parts or "\\" in info.filename or link:
        raise PackagingError(f"{path} holds {info.filename!r}, which is a link, or a path outside the archive.")


def files_of(folder: Path) -> list[Path]:
    """Returns all files below a folder that belong in an archive, sorted by name."""
    plain = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    sources = (path for path in plain if "__pycache__" not in path.parts)
    return sorted(path for path in sources if not path.relative_to(folder).parts[0].startswith(WORKERS_PREFIX))


def write(folder: Path, target: Path) -> None:
    """Writes a folder as a .mar: names sorted, dates and permissions fixed, so that it depends on the content alone.

    The file is renamed into place once it is complete.

    Args:
        folder: Content of the archive, with its manifest, whose ``createdOn`` is overwritten.
        target: The .mar.
    """
    manifest = folder / MANIFEST
    stated = read_json_object(manifest)
    stated["createdOn"] = EPOCH_TEXT
    manifest.write_text(json.dumps(stated, indent=2, sort_keys=True), encoding="utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    with AtomicFile(target, mode=0o644) as draft:
        with zipfile.ZipFile(draft.file, "w") as archive:
            for path in files_of(folder):
                _add(archive, path, path.relative_to(folder).as_posix())
        draft.commit()


def _add(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    info = zipfile.ZipInfo(name, EPOCH)
    info.external_attr = 0o644 << 16
    # Weights and compiled models hardly shrink, and deflating them takes longer than everything else. A quantized
    # program has few weights beside its graph, which is text, and its example inputs, which are zeros.
    stored = path.stat().st_size > 2**20 and path.name != QUANTIZED_MODEL
    info.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
    with path.open("rb") as source, archive.open(info, "w", force_zip64=True) as sink:
        shutil.copyfileobj(source, sink, 2**20)


# --- finds the files beside a model-config.yaml that it names, so that `package` adds them to the archive ---------


def files_named_by(config_file: Path) -> list[Path]:
    """Returns the files of ``op_mappings``, ``record.scrub``, ``wrap`` and ``warmup.samples``.

    A sample that is not there is left out: it may come from elsewhere, and the check of the archive demands it.

    Args:
        config_file: A model-config.yaml. One that is not valid names nothing: the check of the archive says why.

    Raises:
        PackagingError: One of the others is not there.
    """
    # Imported here: it imports torch.
    from torchserve_openvino.serving.loading.op_mappings import mapping_files

    try:
        document = read_yaml(config_file).data
    except ConfigError:
        return []
    section = openvino_section(document)
    named = [("op_mappings", name) for name in mapping_files(document)]
    wrapped = section.get("wrap")
    scrub = _mapping(section.get("record")).get("scrub")
    named += [("record.scrub", scrub)] if isinstance(scrub, str) else []
    named += [("wrap", wrapped)] if isinstance(wrapped, str) and is_handler_file(wrapped) else []
    for key, name in named:
        if not (config_file.parent / name).is_file():
            raise PackagingError(
                f"{config_file} names {name} in handler.openvino.{key}: file not found: {config_file.parent / name}."
            )
    samples = _mapping(section.get("warmup")).get("samples")
    samples = [samples] if isinstance(samples, str) else samples
    # The archive has one folder: a sample in another one has another name there.
    names = [name for name in samples if name == Path(str(name)).name] if isinstance(samples, list) else []
    paths = [config_file.parent / name for _, name in named] + [config_file.parent / name for name in names]
    return [path for path in dict.fromkeys(paths) if path.is_file()]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
