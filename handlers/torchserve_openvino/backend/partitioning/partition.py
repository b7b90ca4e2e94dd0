"""Second stage: decides which nodes run on OpenVINO, and gives the reason for each that does not.

torch's CapabilityBasedPartitioner groups the nodes that the support table accepts into acyclic subgraphs; the other
nodes stay in the outer graph and run in eager PyTorch.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from torchserve_openvino.backend.partitioning.cost_model import PIECE_US, refuse_tiny
from torchserve_openvino.backend.partitioning.views import hand_out_views
from torchserve_openvino.ops import Refusal, does_work, op_name, where_of
from torchserve_openvino.ops.names import HANDED_OUT, value_of

Refuse = Callable[[Node], Refusal | None]


@dataclass(frozen=True)
class RefusedNode:
    """A node that stays in eager PyTorch."""

    op: str
    refusal: Refusal
    where: str


@dataclass
class Part:
    """One subgraph for OpenVINO.

    Attributes:
        name: Target of its ``call_module`` node in the outer graph.
        graph: The subgraph; its placeholders are in the order of ``arguments``.
        arguments: Nodes of the outer graph that it is called with.
        op_counts: Number of operators that do work, by name.
    """

    name: str
    graph: GraphModule
    arguments: tuple[Node, ...]
    op_counts: Counter[str] = field(default_factory=Counter)

    @property
    def ops(self) -> int:
        """Number of operators in it that do work."""
        return sum(self.op_counts.values())

    def output_nodes(self) -> list[Node]:
        """Returns the nodes whose values it returns, in order."""
        (output,) = self.graph.graph.find_nodes(op="output")
        value = output.args[0]
        return list(value) if isinstance(value, (list, tuple)) else [value]

    @property
    def returns_tuple(self) -> bool:
        """Whether its node in the outer graph is a tuple of values."""
        (output,) = self.graph.graph.find_nodes(op="output")
        return isinstance(output.args[0], (list, tuple))


@dataclass
class Partitioned:
    """The outer graph with a call for each part, and the nodes that are in no part."""

    outer: GraphModule
    parts: list[Part]
    left_out: list[RefusedNode]
    ops_total: int


_HANDED_OUT = Refusal("unsupported_op", "a view that leaves the graph")


class _Support(OperatorSupportBase):
    def __init__(self, refuse: Refuse) -> None:
        self.refuse = refuse

    def is_node_supported(self, submodules: Any, node: Node) -> bool:
        return node.op == "call_function" and self.refuse(node) is None


def partition(gm: GraphModule, refuse: Refuse, min_partition_us: float | None = None) -> Partitioned:
    """Splits a lowered graph.

    Args:
        gm: ATen graph from AOTAutograd; it is copied, not changed.
        refuse: Returns the reason to keep a node out of OpenVINO, or None.
        min_partition_us: The option of this name (`BackendOptions`).
    """
    refusals: dict[Node, Refusal | None] = {}
    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(gm.graph, {}))
    outer = GraphModule(gm, copied)
    for node in outer.graph.nodes:
        if node.op == "call_function":
            refusals[node] = refuse(node)
    hand_out_views(outer.graph, [node for node, refusal in refusals.items() if refusal is not None])
    refusals = {
        node: _HANDED_OUT if HANDED_OUT in node.meta else refusals[node]
        for node in outer.graph.nodes
        if node.op == "call_function"
    }

    ops_total = sum(does_work(node) for node in refusals)
    partitioner = CapabilityBasedPartitioner(outer, _Support(refusals.get), allows_single_node_partition=True)
    proposed = [p for p in partitioner.propose_partitions() if any(does_work(n) for n in p.nodes)]
    falls_apart = len(proposed) > 1 or any(refusal and does_work(node) for node, refusal in refusals.items())
    least_us = min_partition_us if min_partition_us is not None else PIECE_US if falls_apart else 0.0
    tiny = {id(p): refusal for p in proposed if (refusal := refuse_tiny(list(p.nodes), least_us)) is not None}
    refusals |= {node: tiny[id(p)] for p in proposed if id(p) in tiny for node in p.nodes}
    proposed = [p for p in proposed if id(p) not in tiny]
    left_out = [
        RefusedNode(op_name(node.target), refusal, where_of(node))
        for node, refusal in refusals.items()
        if refusal is not None and does_work(node)
    ]
    fused = partitioner.fuse_partitions(proposed, prefix="openvino_")
    parts = []
    for node in fused.graph.nodes:
        if node.op == "call_module" and str(node.target).startswith("openvino_"):
            graph = fused.get_submodule(str(node.target))
            assert isinstance(graph, GraphModule)
            counts = Counter(op_name(n.target) for n in graph.graph.nodes if does_work(n))
            parts.append(Part(str(node.target), graph, tuple(node.args), counts))
    return Partitioned(fused, parts, left_out, ops_total)


def input_shapes(gm: GraphModule, static: Collection[int] = ()) -> list[str]:
    """Returns the shapes of a graph's tensor inputs, for the report.

    Args:
        gm: The graph.
        static: Positions of inputs that are weights, which are left out.
    """
    values = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
    tensors = [value for i, value in enumerate(values) if i not in static and isinstance(value, torch.Tensor)]
    return [f"[{', '.join(map(str, value.shape))}]" for value in tensors]


def is_dynamic(gm: GraphModule) -> bool:
    """Checks whether an input has a symbolic size."""
    values = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
    return any(
        isinstance(value, torch.SymInt)
        or (isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape))
        for value in values
    )
