"""Records of what happened while a model was compiled and run: plain data, independent of how it is shown.

The backend appends to these records; `CompileReport` reads them. Nothing here imports torch or OpenVINO.
"""

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torchserve_openvino.config.vocabulary import FallbackKind
from torchserve_openvino.report.records import (
    CacheRecord,
    CallRecords,
    Fallback,
    GraphBreak,
    GraphRecord,
    Kernel,
    PartitionRecord,
    Recompile,
    VerifyRecord,
)

# Most entries of one operator at one place: a reason may quote a value of a request, and requests have many.
_MOST_REASONS = 32
_OTHERS = f"another reason than the {_MOST_REASONS} above"


class Tracker:
    """The records of one compiled model; safe to use from several threads.

    `revision` increases with every change, so that a reader can poll it cheaply. ``builds`` counts how often partitions
    were compiled. ``outside`` holds the operators that ran in eager PyTorch outside any graph: for each name, the
    largest number in one call. ``uncompiled`` holds the places that computed without calling a compiled graph: for
    each, the largest number of operators in one computation. ``ran`` holds the indices of the graphs that ran since
    it was last emptied, of those that were compiled while ``notes_runs`` was set. ``dropped`` holds the indices of
    graphs whose records were removed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.revision = 0
        self.graphs: list[GraphRecord] = []
        self.fallbacks: list[Fallback] = []
        self.graph_breaks: list[GraphBreak] = []
        self.outside: dict[str, int] = {}
        self.uncompiled: dict[str, int] = {}
        self.recompiles: list[Recompile] = []
        self.config: dict[str, Any] = {}
        self.cache = CacheRecord()
        self.verify = VerifyRecord(self._changed)
        self.timings: dict[str, float] = {}
        self.notes: list[str] = []
        self.builds = 0
        self.notes_runs = False
        self.ran: set[int] = set()
        self.call = CallRecords()
        self.dropped: set[int] = set()
        self._indices = itertools.count()
        self._planned = False
        self._kernels: dict[int, Callable[[], list[Kernel]]] = {}

    def add_graph(self, record: GraphRecord) -> GraphRecord:
        """Adds the record of a graph, sets its index and returns it; the backend fills in its partitions."""
        with self._lock:
            record.index = next(self._indices)
        self.restore_graph(record)
        return record

    def restore_graph(self, record: GraphRecord) -> None:
        """Adds the record of a graph; if the present call is rejected, it may be that the graph can give no answer."""
        with self._lock:
            self.dropped.discard(record.index)
            self.graphs.append(record)
            self.revision += 1
        self.call.added(lambda: self.drop_graph(record))

    def add_fallback(
        self,
        kind: FallbackKind,
        op: str,
        *,
        reason: str,
        to: str = "eager",
        where: str = "",
        count: int = 1,
        caused_by_request: bool = False,
        seconds: float = 0.0,
    ) -> bool:
        """Counts a fallback; the same cause at the same place is one entry with a higher count.

        A graph break is a fallback too: the code at the break runs as plain Python.

        Returns:
            Whether this cause is new, so that the caller logs it once.
        """
        with self._lock:
            self.revision += 1
            if kind == "graph_break":
                self._count_break(reason, where, count)
            alike = [f for f in self.fallbacks if (f.kind, f.op, f.to, f.where) == (kind, op, to, where)]
            if len(alike) >= _MOST_REASONS and not any(f.reason == reason for f in alike):
                reason = f"{_OTHERS}, of a request's values" if caused_by_request else _OTHERS
            known = next((f for f in alike if f.reason == reason), None)
            entry = known or Fallback(kind, op, to, reason, where, 0, caused_by_request)
            if known is None:
                self.fallbacks.append(entry)
            entry.count += count
            entry.seconds += seconds
            self.call.added(partial(self._withdraw, entry, count, seconds))
            return known is None

    def _count_break(self, reason: str, where: str, count: int) -> None:
        """Counts a graph break in its own list too: both lists stay consistent."""
        known = next((b for b in self.graph_breaks if (b.reason, b.where) == (reason, where)), None)
        if known is None:
            known = GraphBreak(reason=reason, where=where, count=0)
            self.graph_breaks.append(known)
        known.count += count
        if not known.count:
            self.graph_breaks.remove(known)

    def _withdraw(self, entry: Fallback, count: int, seconds: float) -> None:
        with self._lock:
            self.revision += 1
            entry.count -= count
            entry.seconds -= seconds
            if not entry.count:
                self.fallbacks.remove(entry)
            if entry.kind == "graph_break":
                self._count_break(entry.reason, entry.where, -count)

    def add_outside(self, counts: Mapping[str, int]) -> None:
        """Records the operators that one call ran in eager PyTorch, outside any graph."""
        with self._lock:
            for op, count in counts.items():
                if count > self.outside.get(op, 0):
                    self.outside[op] = count
                    self.revision += 1

    def add_uncompiled(
        self, op: str, where: str, ops: int, seconds: float, reason: str, *, caused_by_request: bool = False
    ) -> bool:
        """Counts what a handler computed in eager PyTorch without calling a compiled graph.

        Args:
            op: Module, method or operator.
            where: ``file:line`` in the handler.
            ops: Operators that do work.
            seconds: Time it took.
            reason: What to do about it.
            caused_by_request: Whether the request asked for it; the coverage of other requests stays as it is.

        Returns:
            Whether this cause is new, so that the caller logs it once.
        """
        source = f"{op} at {where}"
        with self._lock:
            if not caused_by_request and ops > self.uncompiled.get(source, 0):
                self.uncompiled[source] = ops
                self.revision += 1
        return self.add_fallback(
            "outside_compiled", op, reason=reason, where=where, seconds=seconds, caused_by_request=caused_by_request
        )

    def drop_graph(self, record: GraphRecord) -> None:
        """Removes the record of a graph that could not be compiled, or whose call eager PyTorch rejects as well."""
        with self._lock:
            if record.index not in self.dropped:
                self.dropped.add(record.index)
                self.graphs = [other for other in self.graphs if other is not record]
                self.revision += 1

    def add_recompile(self, where: str, reason: str, compile_id: str) -> None:
        """Records that Dynamo compiled a function once more, and which guard failed, unless that was planned."""
        with self._lock:
            if self._planned:
                return
            self.revision += 1
            self.recompiles.append(Recompile(where=where, reason=reason, compile_id=compile_id))

    @contextlib.contextmanager
    def planned_compilation(self) -> Iterator[None]:
        """Counts no recompiles in the block: the first call of a declared shape compiles, as it should."""
        before, self._planned = self._planned, True
        try:
            yield
        finally:
            self._planned = before

    def add_timing(self, name: str, seconds: float) -> None:
        """Adds seconds to a named phase."""
        with self._lock:
            self.revision += 1
            self.timings[name] = self.timings.get(name, 0.0) + seconds

    def add_note(self, note: str) -> None:
        """Adds a remark that is neither a fallback nor an error; repeated ones are kept once."""
        with self._lock:
            if note not in self.notes:
                self.revision += 1
                self.notes.append(note)

    def add_build(self) -> None:
        """Counts one set of compiled partitions: a new graph, or an existing one with other weights."""
        with self._lock:
            self.revision += 1
            self.builds += 1

    def watch_kernels(self, record: PartitionRecord, read: Callable[[], list[Kernel]]) -> None:
        """Remembers how to ask a partition for its kernels; of several builds, the last is asked."""
        with self._lock:
            self._kernels[id(record)] = read

    def kernels(self, record: PartitionRecord) -> list[Kernel]:
        """Returns the kernels of a partition, with times up to now; none if it is not compiled, or was freed."""
        read = self._kernels.get(id(record))
        return read() if read is not None else []

    def note_precision(self, precision: str) -> None:
        """Records the precision of a partition; a model is of the coarsest of its partitions, int8."""
        if self.config.get("effective_precision") != "int8":
            self.config["effective_precision"] = precision

    def set_config(self, name: str, value: Any) -> None:
        """Records one effective setting; its value must be JSON-safe."""
        self.config[name] = value
        self._changed()

    def _changed(self) -> None:
        with self._lock:
            self.revision += 1

    def fallback_counts(self) -> dict[str, int]:
        """Returns fallback counts by kind; kinds without a fallback are absent."""
        counts: Counter[str] = Counter()
        with self._lock:
            for fallback in self.fallbacks:
                counts[fallback.kind] += fallback.count
        return dict(counts)
