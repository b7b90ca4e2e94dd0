"""What the tracker records: plain data, independent of how it is shown."""

from dataclasses import dataclass, field
from typing import Any

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
        float_layers: In a quantised model, the layers whose activations are not quantised: operator to count.
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
