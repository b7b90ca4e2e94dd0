"""The reading half of a store: verifies what it loads, reports damaged entries once and removes them."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torchserve_openvino.cache.storage.directory import NotPlainFileError, foreign, open_plain, remove
from torchserve_openvino.cache.storage.housekeeping import manifests
from torchserve_openvino.cache.storage.locks import commit_lock
from torchserve_openvino.cache.storage.manifest import (
    KINDS,
    MAX_BYTES,
    Entry,
    FileRef,
    ForeignSchemaError,
    decode,
    label,
)
from torchserve_openvino.cache.storage.objects import Objects
from torchserve_openvino.errors import DamagedEntryError

# --- counts of a store's events for the report and metrics, with the reasons of the last failures -----------------


@dataclass
class CacheEvents:
    """Counts since the store was opened; safe to add to from several threads.

    Attributes:
        hits: Entries found.
        misses: Entries that were absent, of another schema, damaged, or that could not be read.
        stored: Entries written.
        damaged: Entries found damaged.
        write_failures: Entries that could not be written, plus one for a folder that cannot be written at all.
        evicted: Entries dropped to keep the size limit.
        lock_waits: Locks that another process held when they were requested.
        lock_timeouts: Locks that were not acquired in time.
        last_damaged: What was wrong with the last damaged entry.
        last_write_failure: Why the last write failed.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    damaged: int = 0
    write_failures: int = 0
    evicted: int = 0
    lock_waits: int = 0
    lock_timeouts: int = 0
    last_damaged: str | None = None
    last_write_failure: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def add(self, name: str, count: int = 1, *, reason: str | None = None) -> None:
        """Adds to a count.

        Args:
            name: Name of a count.
            count: How much to add.
            reason: Stored as the last reason; only for ``damaged`` and ``write_failures``.
        """
        with self._lock:
            setattr(self, name, getattr(self, name) + count)
            if reason is not None:
                setattr(self, {"damaged": "last_damaged", "write_failures": "last_write_failure"}[name], reason)

    def to_dict(self) -> dict[str, Any]:
        """All counts and reasons, JSON-safe."""
        with self._lock:
            return {field.name: getattr(self, field.name) for field in fields(self) if not field.name.startswith("_")}


# --- the reading half of a store: verifies what it loads, reports damaged entries once and removes them -----------


logger = logging.getLogger(__name__)

_FILE_GONE = "an object is missing"


class StoreReader:
    """Loads entries.

    Args:
        root: The store's folder, absolute.
        objects: Its objects.
        events: Where damaged entries are counted.
        writable: Whether to remove damaged entries and to update the time of last use.
        private: Whether a manifest that another user could have written counts as damaged.
    """

    def __init__(self, root: Path, objects: Objects, events: CacheEvents, *, writable: bool, private: bool) -> None:
        self._root = root
        self._objects = objects
        self._events = events
        self._writable = writable
        self._private = private
        # Entries that should be removed but cannot be; they are treated as absent instead.
        self._hidden: set[tuple[str, str]] = set()

    def path_of(self, kind: str, key: str) -> Path:
        """Returns the path of a manifest, which need not exist."""
        return self._root / "entries" / kind / f"{key}.json"

    def hide(self, kind: str, key: str) -> None:
        """Treats an entry as absent from now on."""
        self._hidden.add((kind, key))

    def show(self, kind: str, key: str) -> None:
        """Undoes `hide`."""
        self._hidden.discard((kind, key))

    def get(self, kind: str, key: str) -> Entry | None:
        """Returns the entry if all its files exist, else None; marks it as used."""
        if (kind, key) in self._hidden:
            return None
        try:
            entry = self._load(kind, key)
        except FileNotFoundError:
            return None
        except ForeignSchemaError as error:
            logger.debug("%s is of %s.", label(kind, key), error)
            return None
        except DamagedEntryError as error:
            self._damaged(kind, key, str(error), None)
            return None
        except OSError as error:
            logger.warning("%s cannot be read: %s", label(kind, key), error)
            return None
        for name, ref in entry.files.items():
            try:
                self._objects.look(ref)
            except (FileNotFoundError, DamagedEntryError) as error:
                self._file_damaged(entry, name, error)
                return None
            except OSError as error:
                logger.warning("File %r of %s cannot be read: %s", name, label(kind, key), error)
                return None
        return entry

    def load(self, kind: str, key: str) -> Entry:
        """Returns the entry from its manifest alone, without looking at its files.

        Raises:
            FileNotFoundError: There is no such entry.
            ForeignSchemaError: It is of another schema.
            DamagedEntryError: The manifest is damaged.
            OSError: It cannot be read.
        """
        return self._load(kind, key, touch=False)

    def entries(self, kinds: tuple[str, ...] = KINDS) -> Iterator[Entry]:
        """Yields all entries with an intact manifest, the least recently used first."""
        for manifest in manifests(self._root, kinds):
            if (manifest.kind, manifest.key) not in self._hidden:
                with contextlib.suppress(OSError, DamagedEntryError, ForeignSchemaError):
                    yield self.load(manifest.kind, manifest.key)

    def nearest(self, kind: str, fields: Mapping[str, Any]) -> dict[str, tuple[Any, Any]] | None:
        """As `Store.nearest`, for fields that are plain JSON."""
        best: dict[str, tuple[Any, Any]] | None = None
        for entry in self.entries((kind,)):
            names = sorted(entry.fields.keys() | fields.keys())
            pairs = {name: (entry.fields.get(name), fields.get(name)) for name in names}
            differ = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
            if best is None or len(differ) <= len(best):
                best = differ
        return best

    def read_file(self, entry: Entry, name: str) -> bytes:
        """As `Entry.read`."""
        with self._watched(entry, name) as ref:
            return self._objects.read(ref)

    def file_path(self, entry: Entry, name: str) -> Path:
        """As `Entry.path`."""
        with self._watched(entry, name) as ref:
            return self._objects.verify(ref)

    @contextlib.contextmanager
    def _watched(self, entry: Entry, name: str) -> Iterator[FileRef]:
        about = f"file {name!r} of {label(entry.kind, entry.key)}"
        if name not in entry.files:
            raise DamagedEntryError(f"{label(entry.kind, entry.key)} has no file {name!r}")
        try:
            yield entry.files[name]
        except (FileNotFoundError, DamagedEntryError) as error:
            self._file_damaged(entry, name, error)
            raise DamagedEntryError(f"{about}: {_words(error)}") from error
        except OSError as error:
            raise DamagedEntryError(f"{about} cannot be read: {error}") from error

    def _load(self, kind: str, key: str, *, touch: bool = True) -> Entry:
        path = self.path_of(kind, key)
        try:
            fd = open_plain(path)
        except NotPlainFileError as error:
            raise DamagedEntryError(f"the manifest is {error.strerror}") from error
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if self._private and (who := foreign(status)):
                raise DamagedEntryError(f"the manifest is {who}")
            if status.st_size > MAX_BYTES:
                raise DamagedEntryError(f"the manifest has {status.st_size} bytes, more than {MAX_BYTES}")
            entry = decode(file.read(MAX_BYTES + 1), kind, key, self)
            if touch and self._writable:
                # Set explicitly: the file system's own clock is too coarse to tell which of two entries was used last.
                now = time.time_ns()
                with contextlib.suppress(OSError):
                    os.utime(fd, ns=(now, now))
        return entry

    def _file_damaged(self, entry: Entry, name: str, error: Exception) -> None:
        """Reports a damaged or missing object, unless the whole entry was evicted meanwhile."""
        if isinstance(error, FileNotFoundError) and not self.path_of(entry.kind, entry.key).exists():
            logger.debug("%s was evicted by another process.", label(entry.kind, entry.key))
            return
        self._damaged(entry.kind, entry.key, f"file {name!r}: {_words(error)}", entry)

    def _damaged(self, kind: str, key: str, reason: str, entry: Entry | None) -> None:
        text = f"{label(kind, key)} is damaged: {reason}"
        self._events.add("damaged", reason=text)
        then = "it is removed" if self._writable else "it stays, since the folder cannot be written"
        logger.warning("%s in %s; %s, and will be rebuilt.", text, self._root, then)
        if not self._writable:
            self.hide(kind, key)
            return
        with commit_lock(self._root):
            # Another process may have stored an intact entry in the meantime.
            with contextlib.suppress(OSError, DamagedEntryError, ForeignSchemaError):
                if self.load(kind, key) != entry:
                    return
            if not remove(self.path_of(kind, key)):
                self.hide(kind, key)


def _words(error: Exception) -> str:
    return _FILE_GONE if isinstance(error, FileNotFoundError) else str(error)
