"""The store's folder: who may write to it, and files that are opened and written so that nobody sees half of one."""

import errno
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from torchserve_openvino.errors import CacheDirectoryError

logger = logging.getLogger(__name__)

Buffer = bytes | memoryview

# Opening a pipe that somebody put there must not hang, and a link must not lead elsewhere.
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_WRITE_BYTES = 16 * 2**20
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotPlainFileError(OSError):
    """A link, a folder or a device in the place of a file."""


class Root(NamedTuple):
    """A store's folder.

    Attributes:
        path: Absolute, without links.
        why_read_only: Why nothing can be written there; None where it can.
    """

    path: Path
    why_read_only: str | None


def open_root(root: Path, *, writable: bool, private: bool = True) -> Root:
    """Checks a store's folder, and makes it (mode 0700) if it is to be written.

    Folders above it are not refused: whoever can rename one can put another folder here, but not one that this
    user owns.

    Args:
        root: The folder; it need not exist.
        writable: Whether it is to be written. That it can't be is no error.
        private: Whether others must not be able to write to it. False is for a folder whose neighbours are
            trusted with running code anyway, such as that of an unpacked model archive.

    Raises:
        CacheDirectoryError: It is not a folder, belongs to another user, or others may write to it.
    """
    given, root = root, Path(os.path.realpath(root))
    if given.is_symlink() and not _there(root):
        raise CacheDirectoryError(f"{given} is a link to {root}, which does not exist; remove the link.")
    why = None if writable else "it was opened for reading only"
    try:
        if writable and not _there(root):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _there(root):
            for folder in _folders(root):
                _check_folder(folder, private)
    except (NotADirectoryError, FileExistsError) as error:
        raise CacheDirectoryError(f"{given} cannot be a folder: a part of its path is a file.") from error
    except OSError as error:
        why = why or f"{root} cannot be created or read: {error.strerror or error}"
    if private:
        _look_above(root)
    if why is None and not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        why = f"{root} cannot be written: permission denied, or a read-only file system"
    return Root(root, why)


def _there(path: Path) -> bool:
    """Whether something lies there, as far as this user may know."""
    try:
        path.lstat()
    except OSError:
        return False
    return True


def _folders(root: Path) -> Iterable[Path]:
    """The folder, and those in it down to where the files are."""
    yield root
    if not root.is_dir():
        return
    for name in ("entries", "objects", "locks", "tmp"):
        folder = root / name
        if folder.is_symlink() or folder.exists():
            yield folder
            if name in ("entries", "objects") and folder.is_dir() and not folder.is_symlink():
                with os.scandir(folder) as found:
                    yield from (Path(each.path) for each in found if each.is_symlink() or each.is_dir())


def _check_folder(folder: Path, private: bool) -> None:
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise CacheDirectoryError(f"{folder} is a link, which a cache must not hold; remove it.")
    if not stat.S_ISDIR(status.st_mode):
        raise CacheDirectoryError(f"{folder} is not a folder; remove it, or name another folder.")
    if not private:
        return
    cause = foreign(status)
    if cause:
        owned = status.st_uid in (os.geteuid(), 0)
        fix = f"chmod go-w {folder}" if owned else f"chown -R {os.geteuid()} {folder}"
        raise CacheDirectoryError(
            f"{folder} is {cause}: somebody else could put compiled code there. Look at what is in it, then run "
            f"`{fix}`, or name another folder."
        )


def foreign(status: os.stat_result) -> str | None:
    """In words, who else may write a file or folder; None if only this user and root may."""
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"owned by user {status.st_uid}, not by you (user {os.geteuid()})"
    if status.st_mode & _OTHERS_WRITE:
        return f"writable by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _look_above(root: Path) -> None:
    for folder in root.parents:
        try:
            mode = folder.stat().st_mode
        except OSError:
            continue
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            logger.warning("%s is writable by all users (no sticky bit): they can replace %s.", folder, root)


def open_plain(path: Path) -> int:
    """A file descriptor for reading; follows no link and takes nothing but a plain file.

    Raises:
        FileNotFoundError: There is none.
        NotPlainFileError: Something else is there.
        OSError: It can't be opened, for a reason that says nothing about its content.
    """
    try:
        fd = os.open(path, _READ)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
            raise NotPlainFileError(error.errno, "a link or a device, not a plain file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotPlainFileError(errno.EINVAL, "not a plain file", str(path))
    return fd


def make_folder(folder: Path, below: Path) -> None:
    """Makes a folder and those between it and `below`, each 0700 and on the disk when this returns.

    Raises:
        OSError: A folder could not be made.
    """
    if folder == below or folder.is_dir():
        return
    make_folder(folder.parent, below)
    try:
        os.mkdir(folder, 0o700)  # noqa: PTH102 (one door to the system for tests that stop at each step)
    except FileExistsError:
        return
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Puts a folder's names on the disk, where the file system can do that.

    Raises:
        OSError: The disk failed.
    """
    fd = os.open(folder, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def remove(path: Path) -> bool:
    """Removes a file, or whatever lies in its place; says whether it is gone now and was there before."""
    try:
        os.unlink(path)  # noqa: PTH108
    except FileNotFoundError:
        return False
    except OSError:
        if not path.is_dir() or path.is_symlink():
            return False
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    return True


class Draft:
    """A file under a temporary name, which takes its place in one step or goes away.

    Args:
        root: The store's folder.

    Raises:
        OSError: In each method; the draft is then removed at the end of the ``with``.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        make_folder(root / "tmp", root)
        self._path = root / "tmp" / f"{os.getpid()}-{secrets.token_hex(8)}"
        self._fd = os.open(self._path, _CREATE, 0o600)

    def __enter__(self) -> "Draft":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        remove(self._path)

    def write(self, data: Buffer) -> None:
        """Adds bytes."""
        rest = memoryview(data)
        while rest.nbytes:
            rest = rest[os.write(self._fd, rest[:_WRITE_BYTES]) :]

    def stamp(self, nanoseconds: int) -> None:
        """Sets the time of last use, in nanoseconds since the epoch."""
        os.utime(self._fd, ns=(nanoseconds, nanoseconds))

    def commit(self, target: Path) -> None:
        """Puts the file into its place, on the disk when this returns; replaces what is there."""
        os.fsync(self._fd)
        self._close()
        make_folder(target.parent, self._root)
        try:
            os.replace(self._path, target)  # noqa: PTH105
        except IsADirectoryError:
            remove(target)
            os.replace(self._path, target)  # noqa: PTH105
        sync_folder(target.parent)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
