"""What routes need of a place that keeps compiled models between processes.

`torchserve_openvino.cache.storage` is the one that ships; the backend knows no more of it than this.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

Kind = Literal["call", "partition", "blob"]
Content = bytes | bytearray | memoryview | Path


class Artifact(Protocol):
    """Something stored: plain data, and files. Both were verified."""

    @property
    def body(self) -> Mapping[str, Any]:
        """What was stored, JSON."""

    @property
    def files(self) -> Collection[str]:
        """Names of the files."""

    def read(self, name: str) -> bytes:
        """A file. Raises DamagedEntryError."""
        ...

    def path(self, name: str) -> Path:
        """Where a file lies; it must not be written to. Raises DamagedEntryError."""
        ...


class ArtifactStore(Protocol):
    """Artifacts by kind and key. A failure of the store is a miss, never an error of the call that asked."""

    def get(self, kind: Kind, key: str) -> Artifact | None:
        """What is stored; None where it is absent or damaged."""
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
        """Stores something; None where that is not possible. ``fields`` are what the key was made of."""
        ...

    def discard(self, kind: Kind, key: str) -> None:
        """Drops what is stored, where there is something."""
        ...

    def lock(self, kind: Kind, key: str) -> AbstractContextManager[bool]:
        """Held while something is made, so that other processes wait for it; False where it could not be got."""
        ...

    def nearest(self, kind: Kind, fields: Mapping[str, Any]) -> dict[str, tuple[Any, Any]] | None:
        """How the artifact that differs in the fewest fields differs: ``{field: (stored, wanted)}``."""
        ...
