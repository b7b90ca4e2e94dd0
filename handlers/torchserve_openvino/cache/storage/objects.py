"""Objects: files named after the blake3 digest of their content, so that equal ones lie there once."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

from torchserve_openvino.cache.storage.directory import Buffer, Draft, NotPlainFileError, open_plain
from torchserve_openvino.cache.storage.manifest import HEX, FileRef
from torchserve_openvino.errors import DamagedEntryError

# Fits into a core's cache, so that hashing does not wait for memory a second time.
_CHUNK = 2**20

Source = bytes | bytearray | memoryview | Path


def digest_of(data: Buffer) -> str:
    """Blake3 digest, hexadecimal."""
    return _hasher().update(data).hexdigest()


def _hasher() -> Any:
    return blake3(max_threads=_threads)


def _alone() -> None:
    # blake3's threads stay behind at a fork, and a child that counts on them waits forever.
    global _threads
    _threads = 1


_threads = blake3.AUTO
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_alone)


class Objects:
    """The objects of a store.

    Args:
        root: The store's folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.folder = root / "objects"

    def place(self, digest: str) -> Path:
        """Where an object lies, if it is there."""
        if not HEX.fullmatch(digest):
            raise ValueError(f"a digest is 64 hexadecimal digits, not {digest!r}")
        return self.folder / digest[:2] / digest

    def look(self, ref: FileRef) -> None:
        """Checks, without reading it, that an object is there and has its size.

        Raises:
            FileNotFoundError: It is missing.
            DamagedEntryError: Something else is there, or of another size.
            OSError: It can't be opened.
        """
        os.close(self.open(ref))

    def read(self, ref: FileRef) -> bytes:
        """Content of an object, verified. Raises as `look`."""
        with os.fdopen(self.open(ref), "rb") as file:
            content = file.read(ref.bytes)
        if len(content) != ref.bytes or digest_of(content) != ref.digest:
            raise DamagedEntryError(f"object {ref.digest[:12]} does not match its checksum")
        return content

    def verify(self, ref: FileRef) -> Path:
        """Place of an object whose content was read and is right. Raises as `look`."""
        with os.fdopen(self.open(ref), "rb", buffering=0) as file:
            digest, size = _hasher(), 0
            for chunk in chunks_of(file):
                size += len(chunk)
                digest.update(chunk)
        if size != ref.bytes or digest.hexdigest() != ref.digest:
            raise DamagedEntryError(f"object {ref.digest[:12]} does not match its checksum")
        return self.place(ref.digest)

    def holds(self, ref: FileRef) -> bool:
        """Whether an object is there and its content right."""
        try:
            self.verify(ref)
        except (OSError, DamagedEntryError):
            return False
        return True

    def add(self, source: Source) -> FileRef:
        """Puts an object on the disk, unless it is there in good state.

        Raises:
            OSError: The source cannot be read, or the object not be written.
        """
        if isinstance(source, Path):
            return self._add_file(source)
        data = flat(source)
        ref = FileRef(digest_of(data), memoryview(data).nbytes)
        if not self._keeps(ref):
            with Draft(self._root) as draft:
                draft.write(data)
                draft.commit(self.place(ref.digest))
        return ref

    def _add_file(self, source: Path) -> FileRef:
        digest, size = _hasher(), 0
        with open(source, "rb", buffering=0) as file:
            for chunk in chunks_of(file):
                digest.update(chunk)
                size += len(chunk)
        ref = FileRef(digest.hexdigest(), size)
        if self._keeps(ref):
            return ref
        with open(source, "rb", buffering=0) as file:
            return self.add_chunks(chunks_of(file))

    def add_chunks(self, chunks: Iterator[bytes] | Iterator[memoryview], expected: FileRef | None = None) -> FileRef:
        """Puts an object on the disk as it comes.

        Args:
            chunks: The content.
            expected: What it must turn out to be.

        Raises:
            DamagedEntryError: It is not what was expected; nothing was kept.
            OSError: It cannot be written.
        """
        digest, size = _hasher(), 0
        with Draft(self._root) as draft:
            for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                draft.write(chunk)
            ref = FileRef(digest.hexdigest(), size)
            if expected is not None and ref != expected:
                raise DamagedEntryError(f"object {expected.digest[:12]} does not match its checksum")
            draft.commit(self.place(ref.digest))
        return ref

    def _keeps(self, ref: FileRef) -> bool:
        if not self.holds(ref):
            return False
        try:
            # Young again: what is about to be named must not look like an old orphan.
            os.utime(self.place(ref.digest))
        except OSError:
            return False
        return True

    def open(self, ref: FileRef) -> int:
        """A file descriptor of an object of the right size; its content is not verified. Raises as `look`."""
        try:
            fd = open_plain(self.place(ref.digest))
        except NotPlainFileError as error:
            raise DamagedEntryError(f"object {ref.digest[:12]} is {error.strerror}") from error
        size = os.fstat(fd).st_size
        if size != ref.bytes:
            os.close(fd)
            raise DamagedEntryError(f"object {ref.digest[:12]} has {size} bytes, not {ref.bytes}")
        return fd


def chunks_of(file: Any) -> Iterator[memoryview]:
    """An unbuffered file's content, piece by piece; a piece is valid until the next one is asked for."""
    whole = memoryview(bytearray(_CHUNK))
    while count := file.readinto(whole):
        yield whole[:count]


def flat(source: bytes | bytearray | memoryview) -> Buffer:
    """The bytes of a buffer, copied only where they do not lie in one piece."""
    view = memoryview(source)
    if not view.nbytes:
        return b""
    return view.cast("B") if view.c_contiguous else view.tobytes()
