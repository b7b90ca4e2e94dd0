"""Exports entries to one tar file and imports them from it, to carry them to another machine.

A plain tar file, with the same bytes for the same entries: sorted manifests first, then the objects. Import does not
trust the file. It parses tar blocks itself, since Python's own reader follows extensions of the format that
are not needed here.
"""

import os
import re
import tarfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from torchserve_openvino.cache.storage.directory import NotPlainFileError
from torchserve_openvino.cache.storage.housekeeping import drop_unnamed, manifests
from torchserve_openvino.cache.storage.locks import commit_lock
from torchserve_openvino.cache.storage.manifest import (
    KINDS,
    MAX_BYTES,
    Entry,
    FileRef,
    ForeignSchemaError,
    decode,
    encode,
    label,
    record_of,
)
from torchserve_openvino.cache.storage.store import Problem, Store
from torchserve_openvino.errors import CacheDirectoryError, DamagedEntryError
from torchserve_openvino.files.atomic import AtomicFile

Progress = Callable[[int, int], None]

_BLOCK = tarfile.BLOCKSIZE
_CHUNK = 16 * 2**20
_MANIFEST = re.compile(rf"entries/({'|'.join(KINDS)})/([0-9a-f]{{64}})\.json")
_OBJECT = re.compile(r"objects/([0-9a-f]{2})/(\1[0-9a-f]{62})")
# Manifests are kept in memory until their objects have been read.
_ALL_MANIFESTS_BYTES = 256 * 2**20
# A file that is not a bundle must not flood the terminal.
_MOST_PROBLEMS = 1000


class Moved(NamedTuple):
    """Result of an export or import.

    Attributes:
        entries: Number of entries written or imported.
        bytes: Total size of the objects written; an import does not count those that were already in the store.
        problems: What was left out, and why.
    """

    entries: int
    bytes: int
    problems: tuple[Problem, ...]


def export(
    store: Store,
    path: Path,
    keys: Collection[str] | None = None,
    *,
    kind: str | None = None,
    progress: Progress | None = None,
) -> Moved:
    """Writes entries to a tar file, renamed into place once complete. Damaged entries are left out and reported.

    Args:
        store: Store to read.
        path: Tar file to write.
        keys: Keys of the entries to write; None for all.
        kind: Their kind; None for any.
        progress: Called with the bytes done and their total.

    Raises:
        OSError: The file cannot be written, or an object was removed or changed meanwhile.
        DamagedEntryError: An object was damaged meanwhile.
    """
    entries, problems = _sound(store, keys, kind, progress)
    refs = sorted({ref for entry in entries for ref in entry.files.values()})
    total, done = sum(ref.bytes for ref in refs), 0
    with AtomicFile(path) as draft:
        out = draft.file
        for entry in sorted(entries, key=lambda item: (item.kind, item.key)):
            data = encode(record_of(entry))
            out.write(_header(f"entries/{entry.kind}/{entry.key}.json", len(data)))
            out.write(data + bytes(-len(data) % _BLOCK))
        for ref in refs:
            out.write(_header(f"objects/{ref.digest[:2]}/{ref.digest}", ref.bytes))
            _copy(store, ref, out)
            done += ref.bytes
            if progress is not None:
                progress(total + done, 2 * total)
        out.write(bytes(2 * _BLOCK))
        draft.commit()
    return Moved(len(entries), total, tuple(problems))


def _sound(
    store: Store, keys: Collection[str] | None, kind: str | None, progress: Progress | None
) -> tuple[list[Entry], list[Problem]]:
    """Returns the requested entries that are intact, and the problems of the others."""
    selected = [
        manifest
        for manifest in manifests(store.root)
        if (keys is None or manifest.key in keys) and kind in (None, manifest.kind)
    ]
    absent = sorted(set(keys or ()) - {manifest.key for manifest in selected})
    problems = [Problem("", key, "no such entry") for key in absent]
    loaded: list[Entry] = []
    for manifest in selected:
        try:
            loaded.append(store.load(manifest.kind, manifest.key))
        except (OSError, DamagedEntryError, ForeignSchemaError) as error:
            problems.append(Problem(manifest.kind, manifest.key, str(error), str(manifest.path)))
    total = sum(ref.bytes for ref in {ref for entry in loaded for ref in entry.files.values()})
    verdicts: dict[FileRef, str | None] = {}
    entries: list[Entry] = []
    for entry in loaded:
        wrong = None
        for name, ref in entry.files.items():
            if ref not in verdicts:
                verdicts[ref] = _verdict(store, ref)
                if progress is not None:
                    progress(sum(verdict.bytes for verdict in verdicts), 2 * total)
            if verdicts[ref] is not None and wrong is None:
                wrong = Problem(entry.kind, entry.key, f"file {name!r}: {verdicts[ref]}")
        if wrong is None:
            entries.append(entry)
        else:
            problems.append(wrong)
    return entries, problems


def _verdict(store: Store, ref: FileRef) -> str | None:
    try:
        store.objects.verify(ref)
    except (OSError, DamagedEntryError) as error:
        return str(error)
    return None


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.GNU_FORMAT)


def _copy(store: Store, ref: FileRef, out: BinaryIO) -> None:
    size = 0
    with os.fdopen(store.objects.open(ref), "rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            out.write(chunk)
    if size != ref.bytes:
        raise NotPlainFileError(f"object {ref.digest[:12]} changed while it was read")
    out.write(bytes(-size % _BLOCK))


def import_(
    store: Store, path: Path, *, only: tuple[str, str] | None = None, progress: Progress | None = None
) -> Moved:
    """Imports entries from a tar file that `export` wrote; the file is not trusted.

    Each name, size and checksum is verified. What is wrong is left out and reported, the rest is imported. An entry
    becomes visible only once it is complete.

    Args:
        store: Store to write. Its size limit applies to the content of the file as well.
        path: Tar file to read.
        only: Kind and key of the one entry that is expected; any other is left out. None for all.
        progress: Called with the bytes read and their total.

    Raises:
        CacheDirectoryError: The store cannot be written.
        OSError: The file cannot be read, or the disk is full.
    """
    if store.why_read_only is not None:
        raise CacheDirectoryError(f"nothing can be imported: {store.why_read_only}.")
    with open(path, "rb") as file:
        return _Import(store, file, only, progress).run()


class _Member(NamedTuple):
    name: str
    plain: bool
    size: int


class _Import:
    def __init__(self, store: Store, file: BinaryIO, only: tuple[str, str] | None, progress: Progress | None) -> None:
        self._store = store
        self._file = file
        self._only = only
        self._progress = progress
        self._bytes = os.fstat(file.fileno()).st_size
        self._entries: dict[tuple[str, str], Entry] = {}
        self._wanted: dict[str, set[FileRef]] = {}
        self._kept: set[FileRef] = set()
        self._accepted = 0
        self._manifest_bytes = 0
        self._problems: list[Problem] = []

    def run(self) -> Moved:
        try:
            for member in self._members():
                self._take(member)
            count = sum(self._commit(entry) for entry in self._entries.values())
        finally:
            with commit_lock(self._store.root) as locked:
                if locked:
                    drop_unnamed(self._store.root, {ref.digest for ref in self._kept})
        self._store.prune()
        return Moved(count, sum(ref.bytes for ref in self._kept), tuple(self._problems))

    def _wrong(self, reason: str, kind: str = "", key: str = "") -> None:
        self._problems.append(Problem(kind, key, reason))

    def _members(self) -> Iterator[_Member]:
        """Yields members header by header; stops at the first invalid header, since what follows cannot be located."""
        offset = 0
        while len(self._problems) < _MOST_PROBLEMS:
            self._file.seek(offset)
            block = self._file.read(_BLOCK)
            if block == bytes(_BLOCK):
                return
            try:
                info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
            except (tarfile.HeaderError, ValueError) as error:
                self._wrong(f"invalid tar header at byte {offset} ({error}); the rest was not read")
                return
            end = offset + _BLOCK + info.size + (-info.size % _BLOCK)
            if info.size < 0 or end > self._bytes:
                self._wrong(f"{info.name[:100]!r} claims {info.size} bytes, past the end of the file")
                return
            if info.type != tarfile.DIRTYPE:
                yield _Member(info.name, info.type in (tarfile.REGTYPE, tarfile.AREGTYPE), info.size)
            offset = end
            if self._progress is not None:
                self._progress(offset, self._bytes)

    def _take(self, member: _Member) -> None:
        """Imports one member, whose content comes next in the file."""
        name = repr(member.name[:100])
        manifest, object_ = _MANIFEST.fullmatch(member.name), _OBJECT.fullmatch(member.name)
        if not member.plain:
            self._wrong(f"{name} is a link or a device, not a plain file")
        elif manifest:
            self._take_manifest(manifest[1], manifest[2], member.size)
        elif object_:
            self._take_object(FileRef(object_[2], member.size))
        else:
            self._wrong(f"{name} is not the name of a manifest or an object")

    def _take_manifest(self, kind: str, key: str, size: int) -> None:
        if size > MAX_BYTES or self._manifest_bytes + size > _ALL_MANIFESTS_BYTES:
            self._wrong(f"the manifest has {size} bytes, which is too many", kind, key)
            return
        self._manifest_bytes += size
        if self._only is not None and (kind, key) != self._only:
            self._wrong(f"it is not {label(*self._only)}, for which this file is", kind, key)
            return
        if (kind, key) in self._entries:
            self._wrong("duplicate manifest", kind, key)
            return
        try:
            entry = decode(self._file.read(size), kind, key)
        except (DamagedEntryError, ForeignSchemaError) as error:
            self._wrong(str(error), kind, key)
            return
        needed = {ref for ref in entry.files.values() if ref not in self._wanted.get(ref.digest, ())}
        if self._accepted + size + sum(ref.bytes for ref in needed) > self._store.limit_bytes:
            self._wrong(f"too large for a cache of {self._store.limit_bytes} bytes", kind, key)
            return
        self._accepted += size + sum(ref.bytes for ref in needed)
        self._entries[kind, key] = entry
        for ref in needed:
            self._wanted.setdefault(ref.digest, set()).add(ref)

    def _take_object(self, ref: FileRef) -> None:
        if ref not in self._wanted.get(ref.digest, ()):
            self._wrong(f"object {ref.digest[:12]} with {ref.bytes} bytes belongs to no accepted entry")
            return
        if ref in self._kept or self._store.objects.holds(ref):
            return
        try:
            self._store.objects.add_chunks(self._content(ref.bytes), ref)
        except DamagedEntryError as error:
            self._wrong(str(error))
            return
        self._kept.add(ref)

    def _content(self, size: int) -> Iterator[bytes]:
        while size and (chunk := self._file.read(min(size, _CHUNK))):
            size -= len(chunk)
            yield chunk

    def _commit(self, entry: Entry) -> bool:
        for name, ref in entry.files.items():
            if ref not in self._kept and not self._store.objects.holds(ref):
                self._wrong(f"file {name!r} (object {ref.digest[:12]}) is missing or damaged", entry.kind, entry.key)
                return False
        self._store.commit(entry, {})
        return True
