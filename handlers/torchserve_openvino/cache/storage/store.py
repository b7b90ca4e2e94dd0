"""On-disk store shared by processes: entries are complete or absent, verified before use, and never fail a request."""

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
from torchserve_openvino.cache.storage.housekeeping import Freed, Problem, Progress, StoreSize
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
from torchserve_openvino.cache.storage.reader import CacheEvents, StoreReader
from torchserve_openvino.errors import DamagedEntryError

logger = logging.getLogger(__name__)

LIMIT_BYTES = 20 * 2**30


class Store:
    """Entries in a folder that only this user can write to.

    Args:
        root: The folder; created if absent. A folder that cannot be created or written is only read.
        limit_bytes: Maximum total size of all entries in bytes; the least recently used are evicted first.
        lock_seconds: How long `lock` waits for another process, in seconds.
        writable: Whether to write at all.
        private: Whether to refuse a folder that other users may write to; False for a folder in an unpacked model
            archive, whose code is run anyway.
        packaged: Folder of the entries in a model archive, searched after the store's own; never written.
        created: Creation date to record in entries, so that the same content gives the same files; None for now.

    Attributes:
        root: Absolute path of the folder with links resolved.
        packaged: The same for the packaged entries; None without.
        read_only: Whether it was opened for reading only.
        writable: Whether it can be written.
        why_read_only: Why it cannot be written; None if it can.
        events: Event counts, which include the packaged entries.

    Raises:
        CacheDirectoryError: It is not a folder, belongs to another user, or others may write to it.
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
        self.events = CacheEvents()
        self.read_only = not writable
        self._created = created
        self.root, self.why_read_only = open_root(Path(root), writable=writable, private=private)
        self.writable = self.why_read_only is None
        self.limit_bytes = limit_bytes
        self.lock_seconds = lock_seconds
        self.objects = Objects(self.root)
        self._reader = StoreReader(self.root, self.objects, self.events, writable=self.writable, private=private)
        self._readers = [self._reader]
        self.packaged = None
        if packaged is not None:
            self.packaged = open_root(packaged, writable=False, private=False).path
            self._readers.append(
                StoreReader(self.packaged, Objects(self.packaged), self.events, writable=False, private=False)
            )
        self._told: set[str] = set()
        if self.writable:
            housekeeping.sweep_tmp(self.root, housekeeping.ORPHAN_SECONDS)
        elif writable:
            self._write_failed(self.why_read_only)

    def get(self, kind: Kind | str, key: str) -> Entry | None:
        """Returns an entry, or None if it is absent, of another schema, damaged or unreadable.

        Packaged entries are searched after the store's own. All files of the entry exist; their content is verified
        when it is read.

        Raises:
            ValueError: The kind or key is invalid.
        """
        check_name(kind, key)
        entries = (reader.get(kind, key) for reader in self._readers)
        entry = next((entry for entry in entries if entry is not None), None)
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
        """Stores an entry, replacing an existing one, then evicts others while the store is above its limit.

        Args:
            kind: Kind of the entry.
            key: 64 hexadecimal digits.
            fields: Fields from which the key was made, JSON.
            body: Content to store, JSON.
            files: By name, the content of each file, or the path of the file to copy.

        Returns:
            The entry, or None if it could not be written, which is counted, and logged once per reason. Also None,
            without counting or logging, if the store was opened for reading only.

        Raises:
            ValueError, TypeError: The kind, key or a file's name is invalid, or fields or body are not JSON.
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
        """Makes an entry visible, whose objects must have been added before.

        Args:
            entry: The entry.
            sources: Sources of its files by name, to restore an object that another process removed meanwhile.

        Raises:
            OSError: It could not be written, or a missing object has no source.
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
            draft.commit(self._reader.path_of(entry.kind, entry.key))
        self._reader.show(entry.kind, entry.key)

    def discard(self, kind: Kind | str, key: str) -> None:
        """Removes an entry if it exists; in a folder that is not written to, hides it from this store instead."""
        check_name(kind, key)
        for reader in self._readers[1:]:
            reader.hide(kind, key)
        if not self.writable:
            self._reader.hide(kind, key)
            return
        refs: Mapping[str, FileRef] = {}
        with contextlib.suppress(OSError, DamagedEntryError, ForeignSchemaError):
            refs = self._reader.load(kind, key).files
        if remove(self._reader.path_of(kind, key)):
            self._drop_unnamed(refs)

    def lock(self, kind: Kind | str, key: str) -> AbstractContextManager[bool]:
        """Holds the lock of a key during the ``with``, so that one process creates an entry while others wait for it.

        Yields False after `lock_seconds`, or if no lock file can be created; the caller then works without the lock.
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

        with hold(self.root, f"{kind}-{key}", self.lock_seconds, on_wait=wait, on_long=tell) as locked:
            if waits and not locked:
                self.events.add("lock_timeouts")
                logger.warning(
                    "Another process still builds %s after %.1f s; not waiting any more.",
                    what,
                    time.monotonic() - started,
                )
            yield locked

    def entries(self, kinds: tuple[str, ...] = KINDS) -> Iterator[Entry]:
        """Yields all entries with an intact manifest, the least recently used first, without packaged ones.

        Counts, touches and removes nothing.
        """
        return self._reader.entries(kinds)

    def nearest(self, kind: Kind | str, fields: Mapping[str, Any]) -> dict[str, tuple[Any, Any]] | None:
        """Finds the stored entry that differs in the fewest fields and returns these: ``{field: (stored, wanted)}``.

        A field that one side lacks is None there. Returns None if there is no entry of the kind. Ties go to the most
        recently used entry, and to the store's own before a packaged one.
        """
        plain_fields = plain(fields)
        differences = [near for reader in self._readers if (near := reader.nearest(kind, plain_fields)) is not None]
        return min(differences, key=len, default=None)

    def load(self, kind: Kind | str, key: str) -> Entry:
        """Returns an entry from its manifest alone, for inspection; counts, touches and removes nothing.

        Raises:
            FileNotFoundError: There is no such entry.
            ForeignSchemaError: It is of another schema.
            DamagedEntryError: The manifest is damaged.
            OSError: It cannot be read.
        """
        check_name(kind, key)
        return self._reader.load(kind, key)

    def verify(self, progress: Progress | None = None) -> list[Problem]:
        """Reads everything and returns the problems; removes nothing. `progress` gets bytes read and their total."""
        return housekeeping.verify(self.root, self.objects, self._reader.load, progress)

    def prune(self, limit_bytes: int | None = None, *, older_than: float | None = None) -> Freed:
        """Removes the least recently used entries down to `limit_bytes`, and orphans that are at least an hour old.

        Args:
            limit_bytes: Maximum total size in bytes; the store's own limit if None.
            older_than: Seconds; entries that have not been used for longer are removed as well.
        """
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        return self._change(lambda: housekeeping.shrink(self.root, limit, older_than=older_than))

    def clear(self) -> Freed:
        """Removes all entries, objects and temporary files."""
        return self._change(lambda: housekeeping.clear(self.root))

    def size(self) -> StoreSize:
        """Returns what the store holds, in entries, objects and bytes."""
        return housekeeping.size(self.root)

    def _change(self, work: Callable[[], Freed]) -> Freed:
        if not self.writable:
            return Freed()
        with commit_lock(self.root):
            return work()

    def _evict(self, keep: tuple[str, str]) -> None:
        if housekeeping.size(self.root).bytes <= self.limit_bytes:
            return
        # Otherwise the process that holds the lock is evicting, or checks the size itself after its commit.
        with commit_lock(self.root, 0.0) as locked:
            if locked:
                freed = housekeeping.shrink(self.root, self.limit_bytes, keep=keep)
                self.events.add("evicted", freed.entries)

    def _drop_unnamed(self, refs: Mapping[str, FileRef]) -> None:
        with commit_lock(self.root) as locked:
            if locked:
                housekeeping.drop_unnamed(self.root, {ref.digest for ref in refs.values()})

    def _write_failed(self, reason: str | None) -> None:
        reason = reason or "unknown"
        self.events.add("write_failures", reason=reason)
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("Nothing can be stored in %s; serving continues without storing: %s", self.root, reason)


__all__ = [
    "LIMIT_BYTES",
    "CacheEvents",
    "DamagedEntryError",
    "Entry",
    "FileRef",
    "Freed",
    "Kind",
    "Problem",
    "Store",
    "StoreSize",
]
