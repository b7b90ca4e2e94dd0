"""The interface of a store that keeps compiled models between processes.

`torchserve_openvino.cache.storage` implements it; the backend uses nothing else of it.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

Kind = Literal["call", "partition", "blob"]
Content = bytes | bytearray | memoryview | Path


class Artifact(Protocol):
    """A stored entry: plain data and files, both verified."""

    @property
    def body(self) -> Mapping[str, Any]:
        """The stored data, as in JSON."""

    @property
    def files(self) -> Collection[str]:
        """Names of the files."""

    def read(self, name: str) -> bytes:
        """Returns the content of a file. Raises DamagedEntryError."""
        ...

    def path(self, name: str) -> Path:
        """Returns the path of a file, which must not be written to. Raises DamagedEntryError."""
        ...


class ArtifactStore(Protocol):
    """Stores artifacts by kind and key. A failure of the store counts as a miss and is never raised to the caller."""

    def get(self, kind: Kind, key: str) -> Artifact | None:
        """Returns an artifact; None if it is absent or damaged."""
        ...

    def put(
        self,
        kind: Kind,
        key: str,
        *,
        fields: Mapping[str, Any],
        body: Mapping[str, Any],
        files: Mapping[str, Content] | None = None,
    ) -> Artifact | None:
        """Stores an artifact; returns None if that fails. ``fields`` are the data that the key was computed from."""
        ...

    def discard(self, kind: Kind, key: str) -> None:
        """Removes an artifact, if it exists."""
        ...

    def lock(self, kind: Kind, key: str) -> AbstractContextManager[bool]:
        """Locks a key while its artifact is made, so that other processes wait; yields False if the lock failed."""
        ...

    def nearest(self, kind: Kind, fields: Mapping[str, Any]) -> dict[str, tuple[Any, Any]] | None:
        """Returns the differences from the artifact with the fewest of them: ``{field: (stored, wanted)}``."""
        ...
