"""What the cache did for one model: plain data of the report."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class CacheRecord:
    """Counts of one compiled model.

    Attributes:
        directory: Of the cache; empty while it is off and nothing was packaged.
        packaged: Folder of entries that came with the archive; empty without.
        hits: Partitions that were found compiled, or as IR.
        misses: Partitions that were not found.
        imports: Compiled blobs that OpenVINO read; no compilation.
        compiles: Models that OpenVINO compiled, from IR or from a converted graph.
        traces: Graphs that Dynamo traced.
        call_hits: Input signatures that run without having been traced.
        call_misses: Those that were not found.
        stored: Entries written.
        verified: Signatures from the cache whose answer was compared with eager PyTorch's.
        rejected: Signatures from the cache whose answer differed: thrown away, and compiled anew.
        refused: Why something was not stored or not used, with how often.
        events: Gives the store's own counts: entries damaged, writes that failed, waiting for locks.
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
        """Entries that could not be stored: a full disk, a folder that cannot be written."""
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
        """JSON-safe; of a cache that is off, that and what was compiled."""
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
