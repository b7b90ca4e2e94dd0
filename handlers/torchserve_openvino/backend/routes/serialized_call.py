"""The plain-data parts of a stored call: records, fallbacks, and graphs that are built when they are needed."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchserve_openvino.backend.routes.serialized_graph import PlainGraph, encode
from torchserve_openvino.backend.runtime.assemble import SinglePartition
from torchserve_openvino.report.records import GraphRecord

if TYPE_CHECKING:
    from torchserve_openvino.backend.partitioning.partition import RefusedNode


class LazyGraph:
    """A plain graph that is built when it is first needed, which is when OpenVINO fails."""

    def __init__(self, plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self._plain = dict(plain)
        self._tensors = tensors

    @functools.cached_property
    def _graph(self) -> PlainGraph:
        return PlainGraph(self._plain, {}, self._tensors)

    def __call__(self, *args: Any) -> Any:
        """Runs the graph."""
        return self._graph(*args)


def plain_single(whole: SinglePartition) -> dict[str, Any]:
    """Returns a single partition as JSON-safe data."""
    slots = [[kind, encode(value)] for kind, value in whole.slots]
    return {"part": whole.part, "pick": whole.pick, "slots": slots}


def below(tensors: Mapping[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of one graph, which are named ``GRAPH/NAME``, by ``NAME``."""
    return {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.partition("/")[0] == part}


def plain_record(record: GraphRecord) -> dict[str, Any]:
    """Returns a record as JSON-safe data, without what is specific to the process that compiled."""
    partitions = [
        {
            "name": p.name,
            "ops": p.ops,
            "op_counts": dict(p.op_counts),
            "float_layers": dict(p.float_layers),
            "builds": 0,
        }
        for p in record.partitions
    ]
    facts = dataclasses.asdict(record)
    for name in ("index", "lower_seconds"):
        del facts[name]
    decomposed = {name: {**each, "where": place_of(each["where"])} for name, each in record.decomposed.items()}
    return {**facts, "where": place_of(record.where), "decomposed": decomposed, "partitions": partitions}


def plain_fallback(item: "RefusedNode") -> dict[str, Any]:
    """Returns a refused node as a JSON-safe fallback."""
    refusal = item.refusal
    return {"kind": refusal.kind, "op": item.op, "to": "eager", "reason": refusal.reason, "where": place_of(item.where)}


def place_of(where: str) -> str:
    """Returns ``file:line`` without the folder of the user's file: each worker unpacks the archive to another one."""
    if "site-packages" in where or "dist-packages" in where:
        return where
    return where.rpartition("/")[2]
