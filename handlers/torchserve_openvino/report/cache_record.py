"""What the cache did for one model, as plain data of the report."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class CacheRecord:
    """The cache counters of one compiled model.

    Attributes:
        directory: Folder of the cache; empty if it is off and nothing was packaged.
        packaged: Folder of the entries that came with the archive; empty if there are none.
        hits: Partitions found in the cache, as a compiled blob or as IR.
        misses: Partitions not found, or not usable.
        imports: Compiled blobs that OpenVINO imported instead of compiling.
        compiles: Models that OpenVINO compiled, from IR or from a converted graph.
        traces: Graphs that Dynamo traced.
        call_hits: Input signatures found in the cache, which run without tracing.
        call_misses: Input signatures not found, or not usable.
        stored: Entries written.
        verified: Signatures from the cache whose outputs were compared with eager PyTorch's.
        rejected: Signatures from the cache whose outputs differed; they are discarded and compiled again.
        refused: Reasons why something was not stored or not used, with counts.
        events: Returns the store's own counters: damaged entries, failed writes, waits for locks.
        nearest: For a miss, the fields in which the nearest stored entry differs: name to (stored, wanted).
    """

    enabled: bool = False
    directory: str = ""
    packaged: str = ""
    hits: int = 0
    misses: int = 0
    imports: int = 0
    compiles: int = 0
    traces: int = 0
    call_hits: int = 0
    call_misses: int = 0
    stored: int = 0
    verified: int = 0
    rejected: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    nearest: dict[str, tuple[Any, Any]] | None = None
    events: Callable[[], dict[str, Any]] = dict

    @property
    def write_failures(self) -> int:
        """Entries that could not be stored, e.g. on a full disk or in a folder that is not writable."""
        return int(self.events().get("write_failures", 0))

    @property
    def status(self) -> str:
        """``off``, ``hit`` (nothing was traced or compiled), ``partial``, ``miss``, or ``unused``."""
        if not self.enabled:
            return "off"
        if self.call_hits and not self.traces and not self.compiles:
            return "hit"
        if self.call_hits or self.hits:
            return "partial"
        return "miss" if self.misses or self.call_misses else "unused"

    def to_dict(self) -> dict[str, Any]:
        """Returns the record, JSON-safe; for a cache that is off, only its status and the compilation counts."""
        counts = {"traces": self.traces, "compiles": self.compiles, "imports": self.imports}
        if not self.enabled:
            return {"enabled": False, "status": "off", **counts}
        nearest = self.nearest or {}
        return {
            "enabled": True,
            "status": self.status,
            "directory": self.directory,
            "packaged": self.packaged,
            "hits": self.hits,
            "misses": self.misses,
            **counts,
            "calls": {"hits": self.call_hits, "misses": self.call_misses},
            "stored": self.stored,
            "verified": {"against": "eager", "signatures": self.verified, "rejected": self.rejected},
            "refused": dict(self.refused),
            "nearest": {name: {"stored": stored, "wanted": wanted} for name, (stored, wanted) in nearest.items()},
            "store": self.events(),
        }
