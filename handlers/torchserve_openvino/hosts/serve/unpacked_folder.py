"""`UnpackedFolder`: a private folder for an unpacked archive, which a later server removes if this one is killed."""

import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

_PREFIX = "torchserve-openvino-serve-"
_LOCK = "lock"


class UnpackedFolder:
    """A new temporary folder; its lock is held until it is removed, or this process ends.

    Attributes:
        path: Where the archive is unpacked; it does not exist yet.
    """

    def __init__(self) -> None:
        while not self._create():
            self.remove()
        self.path = Path(self._scratch.name) / "archive"

    def _create(self) -> bool:
        """Returns False if another server took the folder for an abandoned one before its lock was held."""
        self._scratch = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
        self._lock = _lock_in(Path(self._scratch.name))
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            return False
        except OSError as error:
            logger.warning("%s stays if this process is killed: it cannot be locked: %s", self._scratch.name, error)
            return True
        return Path(self._lock.lock_file).exists()

    def remove(self) -> None:
        """Removes the folder; safe to call more than once."""
        self._scratch.cleanup()
        self._lock.release()


def remove_abandoned() -> None:
    """Removes this user's folders whose server was killed: the system has released their locks."""
    for root in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not _is_own(root) or not (root / _LOCK).is_file():
            continue
        try:
            with _lock_in(root).acquire(blocking=False):
                shutil.rmtree(root)
            logger.info("%s is removed: its server was killed", root)
        except Timeout:
            # It is in use.
            continue
        except OSError as error:
            logger.warning("%s cannot be removed: %s", root, error)


def _lock_in(root: Path) -> FileLock:
    # The thread that removes a folder is another one than that which creates it.
    return FileLock(root / _LOCK, mode=0o600, thread_local=False)


def _is_own(root: Path) -> bool:
    try:
        status = root.lstat()
    except OSError:
        # It was removed meanwhile.
        return False
    return stat.S_ISDIR(status.st_mode) and (not hasattr(os, "getuid") or status.st_uid == os.getuid())
