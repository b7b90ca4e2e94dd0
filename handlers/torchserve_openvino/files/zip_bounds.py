"""Refuses zip files that inflate to much more than they hold, before anything is inflated."""

import shutil
import zipfile
import zlib
from pathlib import Path

# What Python's reader raises: also for a member that is encrypted, or compressed in a way that it lacks.
UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError)
# Far above any current model; a file that claims more is damaged, or meant to fill the disk.
MAX_BYTES = 200 * 2**30
MAX_MEMBERS = 100_000
# Up to these sizes, a high ratio is harmless, and occurs: weights that are zeros, tables in text.
PLAIN_BYTES = 64 * 2**20
# Deflated text seldom exceeds 20, weights 1.2; deflate itself ends at 1032.
MAX_RATIO = 100


def why_unbounded(path: Path, archive: zipfile.ZipFile) -> str | None:
    """Returns why a zip file must not be read; None if it may.

    Python's reader and torch's stop at the size that a member claims, so the claims are what has to be bounded.

    Args:
        path: The file.
        archive: The same, opened.
    """
    members, size = archive.infolist(), path.stat().st_size
    if len(members) > MAX_MEMBERS:
        return f"it holds {len(members)} files, more than {MAX_MEMBERS}"
    total = sum(member.file_size for member in members)
    if total > MAX_BYTES:
        return f"it claims {total} bytes of content, more than {MAX_BYTES}"
    for member in members:
        if member.file_size > max(PLAIN_BYTES, MAX_RATIO * member.compress_size):
            return _too_dense(f"{member.filename!r}", member.file_size, member.compress_size)
    # Members may share their compressed bytes: each is harmless then, but not all together.
    if total > max(PLAIN_BYTES, MAX_RATIO * size):
        return _too_dense("it", total, size)
    return None


def why_unbounded_file(path: Path) -> str | None:
    """Returns why a file must not be read; None if it may, or is no zip file."""
    if not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            return why_unbounded(path, archive)
    except zipfile.BadZipFile as error:
        return f"it is a damaged zip file ({error})"


def why_no_room(archive: zipfile.ZipFile, folder: Path) -> str | None:
    """Returns why a zip file can't be unpacked into a folder; None if there is room."""
    total, free = sum(member.file_size for member in archive.infolist()), shutil.disk_usage(folder).free
    if total > free:
        return f"it has {total} bytes of content, and {folder} has room for {free}"
    return None


def read_member(archive: zipfile.ZipFile, name: str, most: int = PLAIN_BYTES) -> bytes:
    """Returns the content of one small file in a zip file that was not unpacked.

    Raises:
        ValueError: It is larger than ``most`` bytes.
        KeyError, zipfile.BadZipFile, OSError: It is missing, or damaged.
    """
    size = archive.getinfo(name).file_size
    if size > most:
        raise ValueError(f"{name!r} has {size} bytes, more than {most}")
    return archive.read(name)


def _too_dense(name: str, size: int, compressed: int) -> str:
    return (
        f"{name} inflates from {compressed} to {size} bytes, more than {MAX_RATIO} times as many. If that is meant, "
        "store it without compression (torch-model-archiver --archive-format zip-store)"
    )
