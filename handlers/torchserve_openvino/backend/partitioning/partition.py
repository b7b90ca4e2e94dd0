"""Second stage: decides which nodes run on OpenVINO, and gives the reason for each that does not.

torch's CapabilityBasedPartitioner groups the nodes that the support table accepts into acyclic subgraphs; the other
nodes stay in the outer graph and run in eager PyTorch.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from torchserve_openvino.backend.partitioning.views import hand_out_views
from torchserve_openvino.ops import Unsupported, does_work, moves_only, op_name, where_of
from torchserve_openvino.ops.names import HANDED_OUT, tensors_of, value_of
from torchserve_openvino.report.records import quantizes

Refuse = Callable[[Node], Unsupported | None]


@dataclass(frozen=True)
class RefusedNode:
    """A node that stays in eager PyTorch."""

    op: str
    refusal: Unsupported
    where: str


@dataclass
class Subgraph:
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

    @property
    def where(self) -> str:
        """``file:line`` of the user's code behind its first operator; empty if unknown."""
        return next((line for node in self.graph.graph.nodes if (line := where_of(node))), "")

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
    parts: list[Subgraph]
    left_out: list[RefusedNode]
    ops_total: int


_HANDED_OUT = Unsupported("unsupported_op", "a view that leaves the graph")


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
    refusals: dict[Node, Unsupported | None] = {}
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
            parts.append(Subgraph(str(node.target), graph, tuple(node.args), counts))
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


# --- estimates whether a piece of a graph is worth the cost of calling OpenVINO -----------------------------------
# A call of a partition costs about 100 microseconds, whatever it computes. A graph that is split into pieces may have
# some with a few light operators that eager PyTorch computes in less time. The figures are from
# scripts/benchmarks/partitions.py: up to 100 microseconds, eager PyTorch was faster in every case; above, it depends on
# how many operators OpenVINO fuses. A graph that runs on OpenVINO as a whole needs only one call, and runs there
# whatever its size, unless the user sets a minimum.


# Default minimum time of a piece in eager PyTorch, if the graph is split.
PIECE_US = 100.0
# Eager PyTorch's dispatch of one operator, and the bytes it reads and writes per microsecond while they fit the cache.
OP_US = 7.0
BYTES_PER_US = 40_000.0
# Light operators. Others take eager PyTorch several passes or a library: a gain there does not show in tensor sizes.
_LIGHT = frozenset({torch.Tag.pointwise, torch.Tag.reduction})


def eager_us(nodes: Sequence[Node]) -> float | None:
    """Estimates the microseconds that eager PyTorch takes for some nodes; None if an operator is not light.

    Args:
        nodes: Nodes with static sizes; also None if a size is symbolic.
    """
    total = 0.0
    for node in nodes:
        if not does_work(node):
            continue
        if not isinstance(node.target, torch._ops.OpOverload) or not _is_light(node.target):
            return None
        tensors = [t for neighbor in (node, *node.all_input_nodes) for t in tensors_of(value_of(neighbor))]
        if any(not isinstance(size, int) for tensor in tensors for size in tensor.shape):
            return None
        total += OP_US + sum(tensor.numel() * tensor.element_size() for tensor in tensors) / BYTES_PER_US
    return total


def _is_light(target: torch._ops.OpOverload) -> bool:
    return bool(_LIGHT.intersection(target.tags)) or moves_only(op_name(target))


def refuse_tiny(nodes: Sequence[Node], least_us: float) -> Unsupported | None:
    """Returns the reason to leave a piece in eager PyTorch, or None.

    Args:
        nodes: The nodes of one proposed partition.
        least_us: Minimum time of a piece in eager PyTorch, in microseconds.
    """
    estimate = eager_us(nodes)
    if estimate is None or estimate >= least_us:
        return None
    ops = sum(does_work(node) for node in nodes)
    return Unsupported(
        "tiny_partition",
        f"a piece of {ops} light operator(s), about {estimate:.0f} us in eager PyTorch: less than it costs to call "
        f"OpenVINO (min_partition_us: {least_us:g})",
    )


# --- which layers of a quantized graph compute in floats, because their input was not quantized -------------------


_DEQUANTIZE = "quantized_decomposed.dequantize_per_"
# Position of the activations among the arguments of layers that have kernels of 8 bits.
_ACTIVATIONS = {
    "aten.convolution.default": 0, "aten.linear.default": 0, "aten.mm.default": 0, "aten.addmm.default": 1,
    "aten.bmm.default": 0, "aten.baddbmm.default": 1, "aten.matmul.default": 0,
}  # fmt: skip


def float_layers(graph: Graph) -> dict[str, int]:
    """Counts the layers whose activations are not quantized, by operator; empty if the graph quantizes nothing."""
    named = [(op_name(node.target), node) for node in graph.nodes if node.op == "call_function"]
    if not quantizes(Counter(name for name, _ in named)):
        return {}
    layers = [(name, node.args[_ACTIVATIONS[name]]) for name, node in named if name in _ACTIVATIONS]
    return dict(Counter(name for name, activations in layers if not _is_dequantized(activations)))


def _is_dequantized(value: object) -> bool:
    """Looks through operators that leave values as they are."""
    while isinstance(value, Node) and value.op == "call_function":
        name = op_name(value.target)
        if name.startswith(_DEQUANTIZE):
            return True
        if not moves_only(name) or not value.args:
            return False
        value = value.args[0]
    return False
