"""The store's folder: checks who may write to it, opens files safely and writes them atomically."""

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
from torchserve_openvino.files.atomic import sync_folder

logger = logging.getLogger(__name__)

Buffer = bytes | memoryview

# Opening a named pipe must not block (O_NONBLOCK), and links must not be followed (O_NOFOLLOW).
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
# Used in a folder that other users may write to; the user's number follows.
PRIVATE_SUBFOLDER = "torchserve-openvino"
_WRITE_BYTES = 16 * 2**20
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotPlainFileError(OSError):
    """A link, a folder or a device where a regular file is expected."""


class Root(NamedTuple):
    """A store's folder.

    Attributes:
        path: Absolute path with links resolved.
        why_read_only: Why the folder cannot be written; None if it can.
    """

    path: Path
    why_read_only: str | None


def open_root(root: Path, *, writable: bool, private: bool = True) -> Root:
    """Checks a store's folder, and creates it (mode 0700) if it is to be written.

    A folder that is shared by its nature, such as a mounted volume, gets a private subfolder, which is used instead.

    Unsafe parent folders are not refused: a user who can rename one can put another folder in this place, but not
    one that this user owns.

    Args:
        root: The folder; it need not exist.
        writable: Whether to write to it. A folder that cannot be written is not an error.
        private: Whether to refuse a folder that other users may write to. False for a folder whose neighbors are
            trusted to run code anyway, such as the folder of an unpacked model archive.

    Raises:
        CacheDirectoryError: It is not a folder, belongs to another user, or others may write to it.
    """
    configured, root = root, Path(os.path.realpath(root))
    if configured.is_symlink() and not _there(root):
        raise CacheDirectoryError(f"{configured} is a link to {root}, which does not exist; remove the link.")
    if private and _is_shared(root):
        root = root / f"{PRIVATE_SUBFOLDER}-{os.geteuid()}"
        message = "Other users may write to %s, so the subfolder %s is used, which is this user's"
        logger.info(message, configured, root.name)
    why = None if writable else "it was opened for reading only"
    try:
        if writable and not _there(root):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _there(root):
            for folder in _folders(root):
                _check_folder(folder, private)
    except (NotADirectoryError, FileExistsError) as error:
        raise CacheDirectoryError(f"{configured} cannot be a folder: a part of its path is a file.") from error
    except OSError as error:
        why = why or f"{root} cannot be created or read: {error.strerror or error}"
    if private:
        _look_above(root)
    if why is None and not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        why = f"{root} cannot be written: permission denied, or a read-only file system"
    return Root(root, why)


def _is_shared(path: Path) -> bool:
    """Returns True for a folder that all may write, or the group of another owner: /tmp, and volumes of Kubernetes."""
    if not hasattr(os, "geteuid"):
        return False
    try:
        status = path.lstat()
    except OSError:
        return False
    by_group = bool(status.st_mode & stat.S_IWGRP) and status.st_uid != os.geteuid()
    return stat.S_ISDIR(status.st_mode) and (bool(status.st_mode & stat.S_IWOTH) or by_group)


def _there(path: Path) -> bool:
    """Whether the path exists (a broken link does), as far as this user can see."""
    try:
        path.lstat()
    except OSError:
        return False
    return True


def _folders(root: Path) -> Iterable[Path]:
    """Yields the folder and its subfolders, down to those that hold the files."""
    yield root
    if not root.is_dir():
        return
    for name in ("entries", "objects", "locks", "tmp"):
        folder = root / name
        if folder.is_symlink() or folder.exists():
            yield folder
            if name in ("entries", "objects") and folder.is_dir() and not folder.is_symlink():
                with os.scandir(folder) as entries:
                    yield from (Path(entry.path) for entry in entries if entry.is_symlink() or entry.is_dir())


def _check_folder(folder: Path, private: bool) -> None:
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise CacheDirectoryError(f"{folder} is a link; a cache folder must not contain links. Remove it.")
    if not stat.S_ISDIR(status.st_mode):
        raise CacheDirectoryError(f"{folder} is not a folder; remove it, or name another folder.")
    if not private:
        return
    cause = foreign(status)
    if cause:
        owned = status.st_uid in (os.geteuid(), 0)
        fix = f"chmod go-w {folder}" if owned else f"chown -R {os.geteuid()} {folder}"
        raise CacheDirectoryError(
            f"{folder} is {cause}: another user could put compiled code there. Check its contents, then run "
            f"`{fix}`, or name another folder."
        )


def foreign(status: os.stat_result) -> str | None:
    """Describes who else may write a file or folder; None if only this user and root may."""
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
    """Opens a regular file for reading, without following links, and returns its file descriptor.

    Raises:
        FileNotFoundError: The file does not exist.
        NotPlainFileError: It is not a regular file.
        OSError: It cannot be opened, for a reason unrelated to its content.
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
    """Creates a folder and its missing parents up to `below`, each with mode 0700 and synced to disk.

    Raises:
        OSError: A folder could not be made.
    """
    if folder == below or folder.is_dir():
        return
    make_folder(folder.parent, below)
    try:
        os.mkdir(folder, 0o700)  # noqa: PTH102 (tests patch functions of os to interrupt at each call)
    except FileExistsError:
        return
    sync_folder(folder.parent)


def remove(path: Path) -> bool:
    """Removes a file, or a folder in its place; returns whether it existed and is gone now."""
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
    """A file written under a temporary name, then atomically renamed into place or removed.

    Args:
        root: The store's folder.

    Raises:
        OSError: By any method; the draft is then removed at the end of the ``with``.
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
        """Appends bytes."""
        rest = memoryview(data)
        while rest.nbytes:
            rest = rest[os.write(self._fd, rest[:_WRITE_BYTES]) :]

    def stamp(self, nanoseconds: int) -> None:
        """Sets the time of last use, in nanoseconds since the epoch."""
        os.utime(self._fd, ns=(nanoseconds, nanoseconds))

    def commit(self, target: Path) -> None:
        """Syncs the file to disk and renames it to `target`, replacing what is there."""
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
