"""Writes a file completely or not at all: under a temporary name beside it, which is then renamed."""

import contextlib
import errno
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

# Never through a link that someone else has put there.
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class AtomicFile:
    """A file that replaces another one by `commit`; without it, the end of the ``with`` removes it.

    It is private to this user until it is committed, also where its folder is not.

    Args:
        target: The file that is replaced, or that appears; not a symbolic link, which would itself be replaced.
        mode: Permissions of the result; those of ``like`` if it is given.
        like: Status of a file whose permissions the result gets, and whose owner as far as this user may set it.
        sync: Whether the content must outlive a power cut. Other processes see all or nothing in either case.
        suffix: End of the temporary name.

    Attributes:
        path: The temporary name.
        file: The open file, binary.

    Raises:
        OSError: It can't be created; by other methods: it can't be written, as where the disk is full.
    """

    def __init__(
        self,
        target: Path,
        *,
        mode: int = 0o600,
        like: os.stat_result | None = None,
        sync: bool = True,
        suffix: str = ".tmp",
    ) -> None:
        self._target, self._mode, self._like, self._sync = target, mode, like, sync
        # Short and without the target's name, which may be as long as names can be.
        self.path = target.with_name(f".{secrets.token_hex(8)}{suffix}")
        self.file: BinaryIO = os.fdopen(os.open(self.path, _CREATE, 0o600), "w+b")
        self._closes = True

    def __enter__(self) -> "AtomicFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.path.unlink(missing_ok=True)
        if not self._closes:
            return
        try:
            self.file.close()
        except OSError:
            # What is still in the buffer does not fit on the disk. `commit` has flushed: then nothing is in it.
            if error is None:
                raise

    def commit(self) -> None:
        """Gives the file its owner, permissions and name; it stays open until the ``with`` ends."""
        self.file.flush()
        descriptor = self.file.fileno()
        if self._like is not None and hasattr(os, "fchown"):
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, self._like.st_uid, self._like.st_gid)
        mode = self._mode if self._like is None else self._like.st_mode & 0o7777
        if mode != 0o600:
            os.chmod(descriptor if os.chmod in os.supports_fd else self.path, mode)  # noqa: PTH101 (of the open file)
        if self._sync:
            os.fsync(descriptor)
        self.path.replace(self._target)
        if self._sync:
            sync_folder(self._target.parent)

    def keep_open(self) -> BinaryIO:
        """Returns the file, which the end of the ``with`` then leaves open, with any lock on it."""
        self._closes = False
        return self.file


def write_atomically(target: Path, content: bytes, *, mode: int = 0o600, sync: bool = True) -> None:
    """Writes a file as `AtomicFile` does. Raises OSError if that fails; the target is unchanged then."""
    with AtomicFile(target, mode=mode, sync=sync) as draft:
        draft.file.write(content)
        draft.commit()


def sync_folder(folder: Path) -> None:
    """Syncs a folder's directory entries to disk, where the file system supports it.

    Raises:
        OSError: The disk failed.
    """
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
