"""What the tracker records: plain data, independent of how it is shown."""

import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torchserve_openvino.config.vocabulary import FallbackKind


@dataclass
class Fallback:
    """One reason why work did not run on OpenVINO.

    Attributes:
        kind: Class of the cause.
        op: Operator (``aten.bincount.default``), partition (``graph 0 / partition 1``) or user function.
        to: What ran it instead, e.g. ``eager``.
        reason: The original message.
        where: ``file:line`` in the user's model, empty where torch does not say.
        count: Nodes for an operator, calls for a runtime failure, occurrences otherwise.
        seconds: Time it took; only measured for work outside every compiled graph.
        caused_by_request: Whether the request itself caused it, so that others are not affected: by the values of an
            input, or by asking for an explanation.
    """

    kind: FallbackKind
    op: str
    to: str
    reason: str
    where: str = ""
    count: int = 1
    caused_by_request: bool = False
    seconds: float = 0.0


@dataclass
class PartitionRecord:
    """One subgraph that was passed to OpenVINO, whether or not it runs there.

    Attributes:
        name: Unique within its graph.
        ops: Operators in it that do work.
        float_layers: In a quantized model, the layers whose activations are not quantized: operator to count.
        runs_on: ``openvino``, ``eager`` or ``inductor``.
        convert_seconds: From FX graph to ov.Model.
        compile_seconds: From ov.Model to CompiledModel, or the import of the blob from the cache.
        inputs: Tensors and integers that are passed at each call.
        constants: Number of weights that are constants in it.
        constant_bytes: Size of those weights.
        execution_devices: Devices that it runs on, as OpenVINO reports them.
        from_cache: Whether it was not compiled, but imported from the cache or OpenVINO's own CACHE_DIR.
        products: With the precision bf16x3, how many products with weights there are (``products``), and how many of
            them are in bf16x3 (``bf16x3``); the same of their ``multiplications`` (a size that is open counts as 1).
        builds: How often it was built (several modules may share one graph; a changed weight builds again).
    """

    name: str
    ops: int
    op_counts: dict[str, int] = field(default_factory=dict)
    float_layers: dict[str, int] = field(default_factory=dict)
    runs_on: str = "openvino"
    convert_seconds: float = 0.0
    compile_seconds: float = 0.0
    inputs: int = 0
    outputs: int = 0
    constants: int = 0
    constant_bytes: int = 0
    execution_devices: list[str] = field(default_factory=list)
    from_cache: bool = False
    products: dict[str, int] = field(default_factory=dict)
    builds: int = 0


# Behind the line, the name of the function.
_FUNCTION = re.compile(r" \([^()]*\)$")


def line_of(where: str) -> str:
    """Returns ``file:line`` of a place that may have a function's name behind it, ``file:line (function)``."""
    return _FUNCTION.sub("", where)


@dataclass
class GraphRecord:
    """One graph that Dynamo passed to the backend.

    Attributes:
        compile_id: Dynamo's own id of the compilation, e.g. ``0/1``.
        where: ``file:line (function)`` of the frame.
        stage: ``inference``, ``forward`` (with autograd) or ``backward``.
        ops_total: Operators that do work in the lowered graph.
        index: Order of arrival.
        dynamic: Whether a size is symbolic.
        inputs: Shapes of the tensors that are passed at each call, such as ``[1, 3, 224, 224]``.
        lower_seconds: From Dynamo's graph to the lowered, partitioned graph.
        left_out: Operators that stay in eager PyTorch: name to count.
        decomposed: Operators that were decomposed: name to ``count``, ``into`` (name to count) and ``where``.
    """

    compile_id: str
    where: str
    stage: str
    ops_total: int
    index: int = 0
    dynamic: bool = False
    lower_seconds: float = 0.0
    partitions: list[PartitionRecord] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    decomposed: dict[str, dict[str, Any]] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        """``file:line`` of the frame; empty if unknown."""
        return line_of(self.where)

    @property
    def ops_on_openvino(self) -> int:
        """Operators whose partition really runs on OpenVINO."""
        return sum(p.ops for p in self.partitions if p.runs_on == "openvino")


@dataclass
class GraphBreak:
    """A place where Dynamo had to leave the graph, with its own reason."""

    reason: str
    where: str
    count: int = 1


@dataclass
class Recompile:
    """A further compilation of a function, with Dynamo's own reason (the guard that failed)."""

    where: str
    reason: str
    compile_id: str
    count: int = 1


# --- what one call added to the records, so that it can be withdrawn if the call gives no answer ------------------


T = TypeVar("T")


class CallRecords(threading.local):
    """The call of a model that runs in this thread.

    A call that eager PyTorch rejects as well has no answer that could have come from OpenVINO: it is no fallback.
    """

    _undo: list[Callable[[], None]] | None = None
    _notices: list[Callable[[], None]]

    def run(self, call: Callable[[], T]) -> T:
        """Returns the result of a call of the model; withdraws what it added if it raises."""
        if self._undo is not None:
            # Inside another call, whose end decides about both.
            return call()
        self._undo, self._notices = [], []
        try:
            result = call()
        except BaseException:
            for undo in reversed(self._undo):
                undo()
            raise
        finally:
            self._undo = None
        for notice in self._notices:
            notice()
        return result

    def added(self, undo: Callable[[], None]) -> None:
        """Notes how to withdraw an addition."""
        if self._undo is not None:
            self._undo.append(undo)

    def when_answered(self, notice: Callable[[], None]) -> None:
        """Calls ``notice``, which logs a fallback, once the call has given an answer."""
        if self._undo is None:
            notice()
        else:
            self._notices.append(notice)


# --- what comparisons of one model with eager PyTorch found, as plain data of the report --------------------------


class VerifyRecord:
    """The report's entry ``verify``; every value is JSON-safe.

    Args:
        changed: Called after each change.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._facts: dict[str, Any] = {}

    def state(self, result: dict[str, Any], part: str = "") -> None:
        """Records the result for the model, or for a part of it that is compiled separately."""
        if part:
            result = {**self._facts, "parts": {**self._facts.get("parts", {}), part: result}}
        self._facts = result
        self._changed()

    def state_first(self, compared: int, mismatches: int, worst: float) -> None:
        """Records how many new graphs were compared at their first call, and the largest difference."""
        # Infinity is no JSON.
        figures = {"compared": compared, "mismatches": mismatches, "worst": worst if worst < float("inf") else "inf"}
        self._facts = {**self._facts, "against": "eager", "passed": not mismatches, **figures}
        self._changed()

    def state_shadow(self, facts: dict[str, Any]) -> None:
        """Records what the comparison of some requests has found so far."""
        if facts != self.shadow:
            self._facts = {**self._facts, "shadow": facts}
            self._changed()

    @property
    def shadow(self) -> dict[str, Any]:
        """What `state_shadow` recorded; empty if ``verify.shadow`` is 0."""
        shadow: dict[str, Any] = self._facts.get("shadow", {})
        return shadow

    @property
    def passed(self) -> bool:
        """Whether the outputs of the model and of all its parts were compared with eager PyTorch's, and matched."""
        parts = self._facts.get("parts", {})
        whole = self._facts.get("passed", bool(parts) and "skipped" not in self._facts) is True
        return whole and all(part.get("passed") is True for part in parts.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns everything that was recorded."""
        return self._facts


# --- what the cache did for one model, as plain data of the report ------------------------------------------------


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
            "nearest": {name: {"stored": stored, "wanted": expected} for name, (stored, expected) in nearest.items()},
            "store": self.events(),
        }


# --- kernels as plain data: which ran, at which precision, for how long -------------------------------------------


# The plugin's words for layers that have kernels of 8 bits, and for the precisions of others.
_LAYERS = {"Convolution", "FullyConnected", "MatMul"}
_FLOATS = {"f32", "bf16x3", "bf16", "f16"}
# The end of the names of operators that the precision bf16x3 adds.
BF16X3_SUFFIX = "/bf16x3"


@dataclass(frozen=True)
class Kernel:
    """One node of a compiled model that computes.

    Attributes:
        kind: The plugin's word, such as ``Convolution``.
        precision: In which it computes: ``f32``, ``bf16x3``, ``bf16``, ``f16``, ``u8``, ``i8``, ``u4``, ...
        primitive: The implementation, such as ``brgconv_avx512_vnni_u8``.
        operators: Names of the operations that were fused into it.
        seconds: Average time of a call; None if it never ran, or its time is not counted.
    """

    kind: str
    precision: str
    primitive: str
    operators: tuple[str, ...]
    seconds: float | None


def precisions(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Returns the share of time in each precision, largest first; the share of kernels if no time is known."""
    known = list(kernels)
    timed = any(kernel.seconds for kernel in known)
    shares: dict[str, float] = defaultdict(float)
    for kernel in known:
        shares[kernel.precision] += (kernel.seconds or 0.0) if timed else 1.0
    total = sum(shares.values())
    rounded = {name: round(share / total, 4) for name, share in shares.items()}
    return {name: share for name, share in sorted(rounded.items(), key=lambda item: -item[1]) if share}


def by_kind(kernels: Iterable[Kernel]) -> list[dict[str, Any]]:
    """Returns kernels of the same kind and precision together, those that take longest first."""
    groups: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.kind, kernel.precision].append(kernel)
    rows = [
        {
            "kind": kind,
            "precision": precision,
            "count": len(group),
            "seconds": None if all(k.seconds is None for k in group) else round(sum(k.seconds or 0 for k in group), 7),
        }
        for (kind, precision), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -(row["seconds"] or 0.0))


def quantizes(op_counts: Mapping[str, int]) -> bool:
    """Whether a graph with these operators computes activations in 8 bits."""
    return any(name.startswith("quantized_decomposed.quantize_per_") for name in op_counts)


def kept_in_floats(kernels: Iterable[Kernel], float_layers: Mapping[str, int]) -> list[dict[str, Any]]:
    """Says what kept the layers of a quantized partition from computing in 8 bits.

    Args:
        kernels: Of the partition.
        float_layers: `PartitionRecord.float_layers`.

    Returns:
        ``op``, ``count`` and ``why`` of each: layers whose input is not quantized, by operator; the rest by kernel.
    """
    layers = [{"op": name, "count": count, "why": "its input is not quantized"} for name, count in float_layers.items()]
    left = sum(float_layers.values())
    for kernel, count in Counter(k.kind for k in kernels if k.kind in _LAYERS and k.precision in _FLOATS).items():
        more, left = max(0, count - left), max(0, left - count)
        if more:
            layers.append({"op": kernel, "count": more, "why": "OpenVINO has no kernel of 8 bits for this form of it"})
    return layers
