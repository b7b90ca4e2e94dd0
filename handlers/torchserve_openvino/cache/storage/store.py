"""A store of entries on disk, shared by processes: complete or absent, checked before use, never a request's error."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torchserve_openvino.cache.storage import housekeeping
from torchserve_openvino.cache.storage.directory import Draft, open_root, remove
from torchserve_openvino.cache.storage.events import Events
from torchserve_openvino.cache.storage.housekeeping import Freed, Problem, Progress, Size
from torchserve_openvino.cache.storage.locks import commit_lock, hold
from torchserve_openvino.cache.storage.manifest import (
    KINDS,
    MAX_BYTES,
    Entry,
    FileRef,
    ForeignSchemaError,
    Kind,
    check_file_name,
    check_name,
    encode,
    label,
    plain,
    record_of,
)
from torchserve_openvino.cache.storage.objects import Objects, Source
from torchserve_openvino.cache.storage.reader import Reader
from torchserve_openvino.errors import DamagedEntryError

logger = logging.getLogger(__name__)

LIMIT_BYTES = 20 * 2**30


class Store:
    """Entries in a folder that only this user can write to.

    Args:
        root: The folder; made if it is absent. One that can't be made or written is read as it is.
        limit_bytes: Size that all entries may have together, in bytes; the least recently used go first.
        lock_seconds: How long `lock` waits for another process, in seconds.
        writable: Whether to write at all.
        private: Whether a folder that others may write to is refused; False for one that lies in an unpacked
            model archive, whose code is run anyway.
        packaged: Folder of entries that came with a model archive, where they are looked for next; only read.
        created: Date that entries state, instead of now; then the same content gives the same files.

    Attributes:
        root: The folder, absolute, without links.
        packaged: That of packaged entries; None without.
        read_only: Whether it was opened for reading only.
        writable: Whether it can be written.
        why_read_only: Why not; None where it can.
        events: Counts, of the packaged entries as well.

    Raises:
        CacheDirectoryError: The folder is none, belongs to another user, or others may write to it.
    """

    def __init__(
        self,
        root: Path,
        *,
        limit_bytes: int = LIMIT_BYTES,
        lock_seconds: float = 600.0,
        writable: bool = True,
        private: bool = True,
        packaged: Path | None = None,
        created: str | None = None,
    ) -> None:
        self.events = Events()
        self.read_only = not writable
        self._created = created
        self.root, self.why_read_only = open_root(Path(root), writable=writable, private=private)
        self.writable = self.why_read_only is None
        self.limit_bytes = limit_bytes
        self.lock_seconds = lock_seconds
        self.objects = Objects(self.root)
        self._reader = Reader(self.root, self.objects, self.events, writable=self.writable, private=private)
        self._readers = [self._reader]
        self.packaged = None
        if packaged is not None:
            self.packaged = open_root(packaged, writable=False, private=False).path
            self._readers.append(
                Reader(self.packaged, Objects(self.packaged), self.events, writable=False, private=False)
            )
        self._told: set[str] = set()
        if self.writable:
            housekeeping.sweep_tmp(self.root, housekeeping.ORPHAN_SECONDS)
        elif writable:
            self._write_failed(self.why_read_only)

    def get(self, kind: Kind | str, key: str) -> Entry | None:
        """The entry, or None where it is absent, of another schema, damaged or unreadable; then the packaged one.

        All its files are there; their content is checked when it is asked for.

        Raises:
            ValueError: Kind or key can't be one.
        """
        check_name(kind, key)
        found = (reader.get(kind, key) for reader in self._readers)
        entry = next((entry for entry in found if entry is not None), None)
        self.events.add("misses" if entry is None else "hits")
        return entry

    def put(
        self,
        kind: Kind | str,
        key: str,
        *,
        fields: Mapping[str, Any],
        body: Mapping[str, Any],
        files: Mapping[str, Source] | None = None,
    ) -> Entry | None:
        """Stores an entry in place of what is there, then drops others while the store is above its limit.

        Args:
            kind: What it is.
            key: 64 hexadecimal digits.
            fields: What the key was made of, JSON.
            body: JSON.
            files: Content by name, or the file to copy.

        Returns:
            The entry, or None where it could not be written: counted, and logged once per reason. None, and nothing
            else, where the store was opened for reading only.

        Raises:
            ValueError, TypeError: Kind, key or a file's name can't be one, or fields or body are no JSON.
        """
        check_name(kind, key)
        sources = dict(files or {})
        for name in sources:
            check_file_name(name)
        if self.read_only:
            return None
        created = self._created or datetime.now(timezone.utc).isoformat(timespec="seconds")
        entry = Entry(kind, key, plain(fields), plain(body), {}, created, self._reader)
        if self.why_read_only is not None:
            self._write_failed(self.why_read_only)
            return None
        refs: dict[str, FileRef] = {}
        try:
            for name, source in sources.items():
                refs[name] = self.objects.add(source)
            entry = dataclasses.replace(entry, files=refs)
            self.commit(entry, sources)
        except OSError as error:
            self._write_failed(f"{error.strerror}" if error.strerror else str(error))
            self._drop_unnamed(refs)
            return None
        self.events.add("stored")
        self._evict(keep=(kind, key))
        return entry

    def commit(self, entry: Entry, sources: Mapping[str, Source]) -> None:
        """Makes an entry visible whose objects were added before.

        Args:
            entry: The entry.
            sources: Where its files come from, should another process have removed an object meanwhile.

        Raises:
            OSError: It could not be written, or an object is missing that no source gives.
        """
        data = encode(record_of(entry))
        if len(data) > MAX_BYTES:
            raise OSError(f"the manifest has {len(data)} bytes, more than {MAX_BYTES}")
        with commit_lock(self.root), Draft(self.root) as draft:
            for name, ref in entry.files.items():
                try:
                    self.objects.look(ref)
                except (FileNotFoundError, DamagedEntryError) as error:
                    if name not in sources or self.objects.add(sources[name]) != ref:
                        raise OSError(f"file {name!r} is missing, or changed while it was stored") from error
            draft.write(data)
            draft.stamp(time.time_ns())
            draft.commit(self._reader.place(entry.kind, entry.key))
        self._reader.show(entry.kind, entry.key)

    def discard(self, kind: Kind | str, key: str) -> None:
        """Drops an entry, where there is one; in a folder that is not written to, hides it from this store."""
        check_name(kind, key)
        for reader in self._readers[1:]:
            reader.hide(kind, key)
        if not self.writable:
            self._reader.hide(kind, key)
            return
        refs: Mapping[str, FileRef] = {}
        with contextlib.suppress(OSError, DamagedEntryError, ForeignSchemaError):
            refs = self._reader.load(kind, key).files
        if remove(self._reader.place(kind, key)):
            self._drop_unnamed(refs)

    def lock(self, kind: Kind | str, key: str) -> AbstractContextManager[bool]:
        """Holds the lock of a key during the ``with``, so that one process makes an entry and others wait for it.

        Gives False after `lock_seconds`, or where no lock file can be made: work without it then.
        """
        check_name(kind, key)
        return self._lock(kind, key) if self.writable else contextlib.nullcontext(False)

    @contextlib.contextmanager
    def _lock(self, kind: str, key: str) -> Iterator[bool]:
        what, started, waits = label(kind, key), time.monotonic(), []

        def wait() -> None:
            waits.append(what)
            self.events.add("lock_waits")

        def tell() -> None:
            logger.warning("Waiting for another process that builds %s, %.0f s at most.", what, self.lock_seconds)

        with hold(self.root, f"{kind}-{key}", self.lock_seconds, on_wait=wait, on_long=tell) as held:
            if waits and not held:
                self.events.add("lock_timeouts")
                logger.warning(
                    "Another process still builds %s after %.1f s; not waiting any more.",
                    what,
                    time.monotonic() - started,
                )
            yield held

    def entries(self, kinds: tuple[str, ...] = KINDS) -> Iterator[Entry]:
        """All entries with a sound manifest, the least recently used first, without packaged ones.

        Counts, touches and removes nothing.
        """
        return self._reader.entries(kinds)

    def nearest(self, kind: Kind | str, fields: Mapping[str, Any]) -> dict[str, tuple[Any, Any]] | None:
        """How that stored entry differs which differs in the fewest fields: ``{field: (stored, wanted)}``.

        A field that one side lacks is None there. None where the kind has no entry; of several as near as each
        other, the one used last, and the store's own before a packaged one.
        """
        wanted = plain(fields)
        found = [near for reader in self._readers if (near := reader.nearest(kind, wanted)) is not None]
        return min(found, key=len, default=None)

    def load(self, kind: Kind | str, key: str) -> Entry:
        """An entry by its manifest alone, for a look at it; nothing is counted, touched or removed.

        Raises:
            FileNotFoundError: There is none.
            ForeignSchemaError: It is of another schema.
            DamagedEntryError: The manifest is damaged.
            OSError: It cannot be read.
        """
        check_name(kind, key)
        return self._reader.load(kind, key)

    def verify(self, progress: Progress | None = None) -> list[Problem]:
        """Reads everything and says what is wrong; removes nothing. `progress` gets bytes read and to read."""
        return housekeeping.verify(self.root, self.objects, self._reader.load, progress)

    def prune(self, limit_bytes: int | None = None, *, older_than: float | None = None) -> Freed:
        """Drops what was not used for longest until `limit_bytes` are left, and orphans of an hour.

        Args:
            limit_bytes: Bytes; the store's own limit if None.
            older_than: Seconds; entries that were not used for longer go as well.
        """
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        return self._change(lambda: housekeeping.shrink(self.root, limit, older_than=older_than))

    def clear(self) -> Freed:
        """Drops everything."""
        return self._change(lambda: housekeeping.clear(self.root))

    def size(self) -> Size:
        """What the store holds, in entries, objects and bytes."""
        return housekeeping.size(self.root)

    def _change(self, work: Callable[[], Freed]) -> Freed:
        if not self.writable:
            return Freed()
        with commit_lock(self.root):
            return work()

    def _evict(self, keep: tuple[str, str]) -> None:
        if housekeeping.size(self.root).bytes <= self.limit_bytes:
            return
        # Whoever holds the lock evicts, or commits and then looks at the size itself.
        with commit_lock(self.root, 0.0) as held:
            if held:
                freed = housekeeping.shrink(self.root, self.limit_bytes, keep=keep)
                self.events.add("evicted", freed.entries)

    def _drop_unnamed(self, refs: Mapping[str, FileRef]) -> None:
        with commit_lock(self.root) as held:
            if held:
                housekeeping.drop_unnamed(self.root, {ref.digest for ref in refs.values()})

    def _write_failed(self, reason: str | None) -> None:
        reason = reason or "unknown"
        self.events.add("write_failures", reason=reason)
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("Nothing can be stored in %s; serving continues without: %s", self.root, reason)


__all__ = [
    "LIMIT_BYTES",
    "DamagedEntryError",
    "Entry",
    "Events",
    "FileRef",
    "Freed",
    "Kind",
    "Problem",
    "Size",
    "Store",
]
