"""Locks between processes. The operating system releases the locks of a process that died."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from torchserve_openvino.cache.storage.directory import make_folder

if TYPE_CHECKING:
    from filelock import FileLock

SILENT_SECONDS = 2.0
# A commit takes milliseconds; a process that holds this lock for longer is stopped or hangs on a failed disk.
_COMMIT_SECONDS = 30.0


@contextlib.contextmanager
def hold(
    root: Path,
    name: str,
    seconds: float,
    *,
    on_wait: Callable[[], None] = lambda: None,
    on_long: Callable[[], None] = lambda: None,
) -> Iterator[bool]:
    """Holds a lock of a store for the duration of the ``with``.

    Args:
        root: The store's folder.
        name: Name of the lock, and of its file without the suffix.
        seconds: How long to wait for another process.
        on_wait: Called if another process holds it.
        on_long: Called if it is not acquired within 2 seconds.

    Yields:
        Whether the lock is held; False after `seconds`, or if no lock file can be created.
    """
    lock = _lock(root, name)
    if lock is None:
        yield False
        return
    locked = _acquire(lock, seconds, on_wait, on_long)
    try:
        yield locked
    finally:
        if locked:
            # The system releases it anyway when the file is closed; an error here must not mask the caller's own.
            with contextlib.suppress(OSError):
                lock.release()


def commit_lock(root: Path, seconds: float = _COMMIT_SECONDS) -> AbstractContextManager[bool]:
    """Holds the lock for putting manifests into place and for removing objects; waits `seconds` at most."""
    return hold(root, "commit", seconds)


def _lock(root: Path, name: str) -> "FileLock | None":
    # Imported here, since it takes longer to import than the rest of the store.
    from filelock import FileLock

    try:
        make_folder(root / "locks", root)
        return FileLock(root / "locks" / f"{name}.lock", mode=0o600)
    except OSError:
        return None


def _acquire(lock: "FileLock", seconds: float, on_wait: Callable[[], None], on_long: Callable[[], None]) -> bool:
    from filelock import Timeout

    end = time.monotonic() + seconds
    steps = ((0.0, on_wait), (min(SILENT_SECONDS, seconds), on_long))
    try:
        for patience, then in steps:
            try:
                lock.acquire(timeout=patience)
            except Timeout:
                then()
                if time.monotonic() >= end:
                    return False
            else:
                return True
        lock.acquire(timeout=max(0.0, end - time.monotonic()))
    except Timeout:
        return False
    except (OSError, NotImplementedError):
        return False
    return True
