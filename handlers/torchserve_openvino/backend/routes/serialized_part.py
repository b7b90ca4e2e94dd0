"""Describes a partition and the graph around it as plain data, for the keys and entries of the cache."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from torchserve_openvino.backend.conversion.mapped_modules import module_of
from torchserve_openvino.backend.partitioning.partition import Part, Partitioned, RefusedNode
from torchserve_openvino.backend.routes.serialized_graph import Plain, PlainGraphError, to_plain
from torchserve_openvino.backend.spec import spec_of
from torchserve_openvino.cache.identity.fingerprint import fingerprint
from torchserve_openvino.cache.identity.tensors import tensor_digest
from torchserve_openvino.ops.mappings import MODULES
from torchserve_openvino.ops.names import value_of
from torchserve_openvino.report.records import GraphRecord


@dataclass
class Blueprint:
    """How a graph was built, so that it can be built again from stored partitions.

    Attributes:
        keys: Key of each partition in the cache, in the order of ``partitioned.parts``.
        record: The graph's record in the report.
    """

    partitioned: Partitioned
    keys: list[str]
    record: GraphRecord = field(repr=False)

    @property
    def left_out(self) -> list[RefusedNode]:
        """Nodes that run in eager PyTorch."""
        return self.partitioned.left_out


def serialized_part(part: Part) -> Plain:
    """Returns everything that decides what a partition computes, except its constants.

    Raises:
        PlainGraphError: The partition holds something without a plain form.
        TypeError: A value can't be passed to OpenVINO.
    """
    return {
        "graph": to_plain(part.graph.graph),
        "inputs": [spec_of(value_of(node)).to_plain() for node in part.arguments],
        "outputs": [spec_of(value_of(node)).to_plain() for node in part.output_nodes()],
        "attributes": {name: tensor_digest(tensor) for name, tensor in attributes(part.graph).items()},
    }


def mapped_modules(part: Part) -> dict[str, str]:
    """Returns digests of a part's mapped modules without their weights, by the names of their operators.

    Raises:
        PlainGraphError: A module holds something that cannot be read.
    """
    found: dict[str, str] = {}
    for name in sorted(part.op_counts):
        if name.startswith(f"{MODULES}."):
            known = fingerprint(module_of(name))
            if known.unknown:
                raise PlainGraphError(f"the mapped module {name} holds {known.unknown[0]}")
            found[name] = known.code
    return found


def attributes(graph: GraphModule) -> dict[str, torch.Tensor]:
    """Returns the tensors that are attributes of a graph.

    Raises:
        PlainGraphError: An attribute is not a tensor, but the nested graph of a higher-order operator.
    """
    found: dict[str, torch.Tensor] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        value: Any = getattr(graph, str(node.target), None)
        if not isinstance(value, torch.Tensor):
            raise PlainGraphError(f"the graph's attribute {node.target} is a {type(value).__name__}")
        found[str(node.target)] = value
    return found
