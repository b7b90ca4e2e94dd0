"""Objects: files named after the blake3 digest of their content, so that equal content is stored once."""

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
    """Returns the blake3 digest, in hexadecimal."""
    return _hasher().update(data).hexdigest()


def _hasher() -> Any:
    return blake3(max_threads=_threads)


def _alone() -> None:
    # A fork does not copy blake3's threads, and a child that relies on them waits forever.
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

    def path_of(self, digest: str) -> Path:
        """Returns the path of an object, which need not exist."""
        if not HEX.fullmatch(digest):
            raise ValueError(f"a digest is 64 hexadecimal digits, not {digest!r}")
        return self.folder / digest[:2] / digest

    def look(self, ref: FileRef) -> None:
        """Checks, without reading it, that an object exists and has the right size.

        Raises:
            FileNotFoundError: It is missing.
            DamagedEntryError: It is not a regular file, or has another size.
            OSError: It cannot be opened.
        """
        os.close(self.open(ref))

    def read(self, ref: FileRef) -> bytes:
        """Returns the verified content of an object. Raises as `look`."""
        with os.fdopen(self.open(ref), "rb") as file:
            content = file.read(ref.bytes)
        if len(content) != ref.bytes or digest_of(content) != ref.digest:
            raise DamagedEntryError(f"object {ref.digest[:12]} does not match its checksum")
        return content

    def verify(self, ref: FileRef) -> Path:
        """Verifies the content of an object and returns its path. Raises as `look`."""
        with os.fdopen(self.open(ref), "rb", buffering=0) as file:
            digest, size = _hasher(), 0
            for chunk in chunks_of(file):
                size += len(chunk)
                digest.update(chunk)
        if size != ref.bytes or digest.hexdigest() != ref.digest:
            raise DamagedEntryError(f"object {ref.digest[:12]} does not match its checksum")
        return self.path_of(ref.digest)

    def holds(self, ref: FileRef) -> bool:
        """Whether an object exists and has the right content."""
        try:
            self.verify(ref)
        except (OSError, DamagedEntryError):
            return False
        return True

    def add(self, source: Source) -> FileRef:
        """Stores an object, unless it is already stored intact.

        Raises:
            OSError: The source cannot be read, or the object cannot be written.
        """
        if isinstance(source, Path):
            return self._add_file(source)
        data = flat(source)
        ref = FileRef(digest_of(data), memoryview(data).nbytes)
        if not self._keeps(ref):
            with Draft(self._root) as draft:
                draft.write(data)
                draft.commit(self.path_of(ref.digest))
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
        """Stores an object chunk by chunk.

        Args:
            chunks: The content.
            expected: Digest and size that the content must have; None accepts any.

        Raises:
            DamagedEntryError: It does not match `expected`; nothing was stored.
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
            draft.commit(self.path_of(ref.digest))
        return ref

    def _keeps(self, ref: FileRef) -> bool:
        if not self.holds(ref):
            return False
        try:
            # Updates its time: an object that a manifest is about to refer to must not look like an old orphan.
            os.utime(self.path_of(ref.digest))
        except OSError:
            return False
        return True

    def open(self, ref: FileRef) -> int:
        """Opens an object, checks its size but not its content, and returns a file descriptor. Raises as `look`."""
        try:
            fd = open_plain(self.path_of(ref.digest))
        except NotPlainFileError as error:
            raise DamagedEntryError(f"object {ref.digest[:12]} is {error.strerror}") from error
        size = os.fstat(fd).st_size
        if size != ref.bytes:
            os.close(fd)
            raise DamagedEntryError(f"object {ref.digest[:12]} has {size} bytes, not {ref.bytes}")
        return fd


def chunks_of(file: Any) -> Iterator[memoryview]:
    """Yields the content of an unbuffered file in chunks; each is valid until the next one is requested."""
    whole = memoryview(bytearray(_CHUNK))
    while count := file.readinto(whole):
        yield whole[:count]


def flat(source: bytes | bytearray | memoryview) -> Buffer:
    """Returns the bytes of a buffer, copied only if it is not contiguous."""
    view = memoryview(source)
    if not view.nbytes:
        return b""
    return view.cast("B") if view.c_contiguous else view.tobytes()
