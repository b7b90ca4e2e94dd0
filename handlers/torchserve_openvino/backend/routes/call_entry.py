"""What an entry of a call holds, checked when it is read: any other type or field makes it unusable.

The checksum of an entry shows that it is as it was written, not who wrote it. What passes here can be counted, shown
and run: numbers are numbers, names are text, and positions and parts exist.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_validator

from torchserve_openvino.backend.spec import Interface
from torchserve_openvino.config.vocabulary import FallbackKind
from torchserve_openvino.report.records import GraphRecord, PartitionRecord


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredNode(_Stored):
    """A node of a plain graph; see `serialized_graph`."""

    op: Literal["placeholder", "attribute", "part", "call", "output"]
    name: str = ""
    args: Any = None
    kwargs: Any = None


class StoredGraph(_Stored):
    """A plain graph."""

    nodes: list[StoredNode]


class StoredPart(_Stored):
    """A partition: its name in the graph, the key of its entry, and the same in ATen operators."""

    name: str
    key: str
    graph: StoredGraph
    returns_tuple: bool


class StoredWhole(_Stored):
    """A graph that is one partition; see `SinglePartition`."""

    part: str
    pick: list[NonNegativeInt]
    slots: list[tuple[str, Any]]


class StoredFallback(_Stored):
    """An operator that stays in eager PyTorch."""

    kind: FallbackKind
    op: str
    to: str
    reason: str
    where: str


class StoredDecomposition(_Stored):
    """An operator that was decomposed; see `GraphRecord.decomposed`."""

    count: NonNegativeInt
    into: dict[str, NonNegativeInt]
    where: str


class StoredPartitionRecord(_Stored):
    """The part of a `PartitionRecord` that is stored."""

    name: str
    ops: NonNegativeInt
    op_counts: dict[str, NonNegativeInt]
    float_layers: dict[str, NonNegativeInt]
    builds: NonNegativeInt


class StoredRecord(_Stored):
    """The part of a `GraphRecord` that is stored."""

    compile_id: str
    where: str
    stage: str
    ops_total: NonNegativeInt
    dynamic: bool
    partitions: list[StoredPartitionRecord]
    left_out: dict[str, NonNegativeInt]
    decomposed: dict[str, StoredDecomposition]
    inputs: list[str]

    def to_record(self) -> GraphRecord:
        """Returns the record for the report."""
        facts = self.model_dump()
        partitions = [PartitionRecord(**record) for record in facts.pop("partitions")]
        return GraphRecord(**facts, partitions=partitions)


_Leaf = tuple[Literal["leaf"], NonNegativeInt]
_Named = tuple[Literal["weight", "tensor"], str]
_Literal = tuple[Literal["literal"], Any]


class StoredCall(_Stored):
    """The body of an entry.

    Attributes:
        identity: Digest of the graph, which several signatures may share.
        outer: The graph around the partitions; None where ``whole`` is all of it.
        inputs: Where each input of the graph comes from.
        out: Each leaf of the result: whether it is computed, and which result it is, or the literal.
        out_spec: Structure of the result; empty for a single leaf.
    """

    identity: str
    parts: list[StoredPart]
    whole: StoredWhole | None
    outer: StoredGraph | None
    record: StoredRecord
    left_out: list[StoredFallback]
    inputs: list[_Leaf | _Named | _Literal]
    out: list[tuple[bool, Any]]
    out_spec: str

    @model_validator(mode="after")
    def _is_consistent(self) -> "StoredCall":
        names = [part.name for part in self.parts]
        if len(set(names)) != len(names) or len(self.record.partitions) != len(names):
            raise ValueError("the partitions do not fit their records")
        if (self.whole is None) == (self.outer is None) or (self.whole is not None and self.whole.part not in names):
            raise ValueError("it has no graph, or two of them")
        if any(is_result and type(value) is not int for is_result, value in self.out):
            raise ValueError("a result has no position")
        return self


def read_call(body: Mapping[str, Any]) -> StoredCall:
    """Reads the body of an entry.

    Raises:
        ValueError: It is not one that this version writes.
    """
    return StoredCall.model_validate(dict(body))


# --- what an entry of a partition holds, checked when it is read, as that of a call is ----------------------------


_Spec = tuple[str, tuple[int, ...], bool, tuple[NonNegativeInt, ...] | None, tuple[str, ...]]
_Bounds = tuple[int, int, str, int | None, int | None]


class _StoredInterface(BaseModel):
    """The types in the result of `Interface.to_plain`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    runtime: tuple[NonNegativeInt, ...]
    inputs: tuple[_Spec, ...]
    outputs: tuple[_Spec, ...]
    arguments: NonNegativeInt
    constant_bytes: NonNegativeInt
    limits: tuple[tuple[int, tuple[tuple[NonNegativeInt, _Bounds], ...]], ...]
    order: tuple[NonNegativeInt, ...]
    checks: tuple[str, ...]


class _StoredPartition(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    interface: _StoredInterface


def read_interface(body: Mapping[str, Any]) -> Interface:
    """Reads the body of an entry.

    Raises:
        KeyError: A type can't be passed to OpenVINO.
        ValueError: It is not a body that this version writes.
    """
    return Interface.of_plain(_StoredPartition.model_validate(dict(body)).interface.model_dump())
