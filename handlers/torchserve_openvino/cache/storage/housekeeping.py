"""Maintains a store: evicts the least recently used entries, removes orphans, verifies content.

Entries and objects are removed under the store's commit lock. Writers hold the same lock while they check once more
that all objects exist and put the manifest into place, so no new manifest refers to an object that is being removed.
"""

import dataclasses
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from torchserve_openvino.cache.storage.directory import open_plain, remove
from torchserve_openvino.cache.storage.manifest import (
    HEX,
    KINDS,
    MAX_BYTES,
    Entry,
    FileRef,
    ForeignSchemaError,
    digests_in,
)
from torchserve_openvino.cache.storage.objects import Objects
from torchserve_openvino.errors import DamagedEntryError

Progress = Callable[[int, int], None]

# Younger files may belong to a process that is still writing.
ORPHAN_SECONDS = 3600.0

_MANIFEST = re.compile(rf"({HEX.pattern})\.json")


class StoreSize(NamedTuple):
    """What a store holds.

    Attributes:
        entries: Number of manifests.
        objects: Number of objects.
        bytes: Total size of both; an object that entries share counts once.
    """

    entries: int
    objects: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Freed:
    """What was removed.

    Attributes:
        entries: Number of entries.
        files: Number of objects and temporary files.
        bytes: Total size.
    """

    entries: int = 0
    files: int = 0
    bytes: int = 0

    def __add__(self, other: "Freed") -> "Freed":
        return Freed(self.entries + other.entries, self.files + other.files, self.bytes + other.bytes)


class Problem(NamedTuple):
    """A problem found in a store or bundle.

    Attributes:
        kind: Kind of the affected entry; empty if there is none.
        key: Key of the affected entry; empty if there is none.
        reason: What is wrong.
        path: Affected file; empty if there is none.
    """

    kind: str
    key: str
    reason: str
    path: str = ""


class ManifestFile(NamedTuple):
    """A manifest file found on disk, not read yet."""

    kind: str
    key: str
    path: Path
    bytes: int
    used: float


def manifests(root: Path, kinds: tuple[str, ...] = KINDS) -> list[ManifestFile]:
    """Returns all manifest files, the least recently used first."""
    manifest_files = []
    for kind in kinds:
        for path, status in _files(root / "entries" / kind):
            if match := _MANIFEST.fullmatch(path.name):
                manifest_files.append(ManifestFile(kind, match[1], path, status.st_size, status.st_mtime_ns / 1e9))
    return sorted(manifest_files, key=lambda manifest: (manifest.used, manifest.kind, manifest.key))


def objects(root: Path) -> dict[str, tuple[Path, os.stat_result]]:
    """Returns all objects by digest."""
    by_digest = {}
    for folder in _folders(root / "objects"):
        by_digest.update({path.name: (path, status) for path, status in _files(folder) if HEX.fullmatch(path.name)})
    return by_digest


def size(root: Path) -> StoreSize:
    """Counts entries, objects and bytes."""
    entries, files = manifests(root), objects(root)
    total = sum(entry.bytes for entry in entries) + sum(status.st_size for _, status in files.values())
    return StoreSize(len(entries), len(files), total)


def shrink(
    root: Path, limit: int | None, *, keep: tuple[str, str] | None = None, older_than: float | None = None
) -> Freed:
    """Removes old orphans, and entries starting with the least recently used; the caller holds the commit lock.

    Args:
        root: The store's folder.
        limit: Maximum total size in bytes; None for no limit.
        keep: Kind and key of an entry that stays in any case.
        older_than: Seconds; an entry that has not been used for longer is removed whatever the total size.
    """
    entries, files = manifests(root), objects(root)
    names = {entry.path: _names(entry.path) for entry in entries}
    used = Counter(digest for digests in names.values() for digest in digests or ())
    # What an entry that cannot be read needs is not known.
    may_be_used = None in names.values()
    now = time.time()
    freed = sweep_tmp(root, ORPHAN_SECONDS)
    total = sum(entry.bytes for entry in entries) + sum(status.st_size for _, status in files.values())
    for digest, (path, status) in files.items():
        is_orphan = not used[digest] and not may_be_used
        if is_orphan and now - status.st_mtime >= ORPHAN_SECONDS and remove(path):
            freed += Freed(files=1, bytes=status.st_size)
            total -= status.st_size
    for entry in entries:
        too_old = older_than is not None and now - entry.used > older_than
        too_much = limit is not None and total > limit
        if (entry.kind, entry.key) == keep or not (too_old or too_much) or not remove(entry.path):
            continue
        gone = Freed(entries=1, bytes=entry.bytes)
        for digest in names[entry.path] or ():
            used[digest] -= 1
            if digest in files and not used[digest] and remove(files[digest][0]):
                gone += Freed(files=1, bytes=files[digest][1].st_size)
        total -= gone.bytes
        freed += gone
    return freed


def drop_unnamed(root: Path, digests: set[str]) -> Freed:
    """Removes those of the given objects that no manifest refers to; the caller holds the commit lock."""
    freed = Freed()
    if digests:
        names = [_names(manifest.path) for manifest in manifests(root)]
        if None in names:
            return freed
        for digest in digests.difference(*(some for some in names if some is not None)):
            path = root / "objects" / digest[:2] / digest
            status = _status(path)
            if status is not None and remove(path):
                freed += Freed(files=1, bytes=status.st_size)
    return freed


def sweep_tmp(root: Path, seconds: float) -> Freed:
    """Removes temporary files that are at least `seconds` old."""
    freed, now = Freed(), time.time()
    for path, status in _files(root / "tmp"):
        if now - status.st_mtime >= seconds and remove(path):
            freed += Freed(files=1, bytes=status.st_size)
    return freed


def clear(root: Path) -> Freed:
    """Removes all entries, objects and temporary files; locks stay, since a process may hold one."""
    freed = Freed()
    for kind in _folders(root / "entries"):
        for path, status in _files(kind):
            if remove(path):
                freed += Freed(entries=int(path.suffix == ".json"), bytes=status.st_size)
    for folder in _folders(root / "objects"):
        for path, status in _files(folder):
            if remove(path):
                freed += Freed(files=1, bytes=status.st_size)
    return freed + sweep_tmp(root, -1.0)


def verify(
    root: Path, kept: Objects, load: Callable[[str, str], Entry], progress: Progress | None = None
) -> list[Problem]:
    """Checks each manifest, and each object once.

    Args:
        root: The store's folder.
        kept: Its objects.
        load: Returns the entry of a kind and key, or raises.
        progress: Called with the bytes read and their total.
    """
    problems, entries = [], []
    for manifest in manifests(root):
        try:
            entries.append(load(manifest.kind, manifest.key))
        except (FileNotFoundError, ForeignSchemaError):
            continue
        except (OSError, DamagedEntryError) as error:
            problems.append(Problem(manifest.kind, manifest.key, str(error), str(manifest.path)))
    present = objects(root)
    refs = {ref for entry in entries for ref in entry.files.values()}
    named = {ref.digest for ref in refs}
    refs |= {FileRef(digest, status.st_size) for digest, (_, status) in present.items() if digest not in named}
    total, done = sum(ref.bytes for ref in refs if ref.digest in present), 0
    wrong: dict[FileRef, str] = {}
    for ref in sorted(refs):
        try:
            kept.verify(ref)
        except FileNotFoundError:
            wrong[ref] = f"object {ref.digest[:12]} is missing"
        except (OSError, DamagedEntryError) as error:
            wrong[ref] = str(error)
        done += ref.bytes if ref.digest in present else 0
        if progress is not None:
            progress(done, total)
    for entry in entries:
        for name, ref in entry.files.items():
            if ref in wrong:
                path = str(kept.path_of(ref.digest))
                problems.append(Problem(entry.kind, entry.key, f"file {name!r}: {wrong[ref]}", path))
    for ref, reason in wrong.items():
        # An orphan that is missing now was removed by another process.
        if ref.digest not in named and os.path.lexists(kept.path_of(ref.digest)):
            problems.append(Problem("", "", f"{reason}, and no entry refers to it", str(kept.path_of(ref.digest))))
    return sorted(problems)


def _names(path: Path) -> set[str] | None:
    """Returns the digests in a manifest; none if it is gone, and None if it can't be read, as another user's."""
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            return digests_in(file.read(MAX_BYTES))
    except FileNotFoundError:
        return set()
    except OSError:
        return None


def _folders(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    yield from map(Path, names)


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields what is in a folder with its own status (a link's, not its target's); skips what vanishes meanwhile."""
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208
    except OSError:
        return
    for name in names:
        status = _status(folder / name)
        if status is not None:
            yield folder / name, status


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None
