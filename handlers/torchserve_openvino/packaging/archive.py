"""Makes a .mar with torch-model-archiver, unpacks it, and rewrites it so that the same content gives the same bytes."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from torchserve_openvino.cache.open import WORKERS_PREFIX
from torchserve_openvino.errors import PackagingError
from torchserve_openvino.serving.loading.archive import MANIFEST, QUANTIZED_MODEL

# The earliest date that a zip file can store; it replaces the current time in everything that is packaged.
EPOCH = (1980, 1, 1, 0, 0, 0)
EPOCH_TEXT = "01/01/1980 00:00:00"
# Far above any current model; an archive that claims more is damaged, or meant to fill the disk.
MAX_BYTES = 200 * 2**30


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
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise PackagingError(f"torch-model-archiver failed: {said[-1] if said else f'exit code {done.returncode}'}")
    return path


def extract(path: Path, folder: Path) -> None:
    """Unpacks an archive into an empty folder.

    Raises:
        PackagingError: It is not a valid .mar, or holds links, paths outside the archive, or too much data.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            total = sum(info.file_size for info in infos)
            if total > MAX_BYTES:
                raise PackagingError(f"{path} claims {total} bytes of content, more than {MAX_BYTES}.")
            for info in infos:
                _check_name(path, info)
                archive.extract(info, folder)
    except (zipfile.BadZipFile, OSError) as error:
        raise PackagingError(f"{path} cannot be read as a .mar: {error}.") from error
    if not (folder / MANIFEST).is_file():
        raise PackagingError(f"{path} has no {MANIFEST}: it was not made by torch-model-archiver.")


def _check_name(path: Path, info: zipfile.ZipInfo) -> None:
    parts = PurePosixPath(info.filename).parts
    link = (info.external_attr >> 16) & 0o170000 == 0o120000
    if info.filename.startswith("/") or ".." in parts or "\\" in info.filename or link:
        raise PackagingError(f"{path} holds {info.filename!r}, which is a link, or a path outside the archive.")


def files_of(folder: Path) -> list[Path]:
    """Returns all files below a folder that belong in an archive, sorted by name."""
    plain = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    found = (path for path in plain if "__pycache__" not in path.parts)
    return sorted(path for path in found if not path.relative_to(folder).parts[0].startswith(WORKERS_PREFIX))


def write(folder: Path, target: Path) -> None:
    """Writes a folder as a .mar: names sorted, dates and permissions fixed, so that it depends on the content alone.

    The file is renamed into place once it is complete.

    Args:
        folder: Content of the archive, with its manifest, whose ``createdOn`` is overwritten.
        target: The .mar.
    """
    manifest = folder / MANIFEST
    stated = json.loads(manifest.read_text(encoding="utf-8"))
    stated["createdOn"] = EPOCH_TEXT
    manifest.write_text(json.dumps(stated, indent=2, sort_keys=True), encoding="utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                for path in files_of(folder):
                    _add(archive, path, path.relative_to(folder).as_posix())
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _add(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    info = zipfile.ZipInfo(name, EPOCH)
    info.external_attr = 0o644 << 16
    # Weights and compiled models hardly shrink, and deflating them takes longer than everything else. A quantised
    # program has few weights beside its graph, which is text, and its example inputs, which are zeros.
    stored = path.stat().st_size > 2**20 and path.name != QUANTIZED_MODEL
    info.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
    with path.open("rb") as source, archive.open(info, "w", force_zip64=True) as sink:
        shutil.copyfileobj(source, sink, 2**20)
