"""Assembles the outer graph and its compiled partitions into one function."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from torchserve_openvino.backend.runtime.execute import FallbackPartition

if TYPE_CHECKING:
    from torch.fx import GraphModule


def picker(positions: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Returns a fast function from a sequence of arguments to the tuple of those at ``positions``."""
    if not positions:
        return lambda args: ()
    if len(positions) == 1:
        (only,) = positions
        return lambda args: (args[only],)
    return itemgetter(*positions)


def assemble(outer: "GraphModule", calls: Mapping[str, FallbackPartition]) -> Callable[..., Any]:
    """Returns the outer graph as a function, with its ``call_module`` nodes bound to ``calls``."""
    whole = SinglePartition.of(outer)
    if whole is not None:
        return whole.bind(calls[whole.part])
    root: dict[str, Any] = dict(calls)
    for node in outer.graph.find_nodes(op="get_attr"):
        root[str(node.target)] = getattr(outer, str(node.target))
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(outer.graph, {}))
    return torch.fx.GraphModule(root, graph).forward


@dataclass(frozen=True)
class SinglePartition:
    """An outer graph that consists of a single partition, so that the partition can be called directly.

    Attributes:
        part: Name of the partition.
        pick: Positions of its arguments among the graph's inputs.
        slots: For each output of the graph: ``("result", i)`` for a result of the partition, ``("input", i)`` for a
            graph input that is passed through, or ``("constant", value)``.
    """

    part: str
    pick: list[int]
    slots: list[tuple[str, Any]]

    @classmethod
    def of(cls, outer: "GraphModule") -> "SinglePartition | None":
        """Describes an outer graph; None if it is not a single partition."""
        inner = [node for node in outer.graph.nodes if node.op not in {"placeholder", "output"}]
        modules = [node for node in inner if node.op == "call_module"]
        if len(modules) != 1 or any(node is not modules[0] and not _is_passthrough(node) for node in inner):
            return None
        (module,) = modules
        position = {node: i for i, node in enumerate(outer.graph.find_nodes(op="placeholder"))}
        slots: list[tuple[str, Any]] = []
        (output,) = outer.graph.find_nodes(op="output")
        for value in output.args[0]:
            if value is module:
                slots.append(("result", 0))
            elif isinstance(value, torch.fx.Node) and _is_passthrough(value):
                slots.append(("result", value.args[1]))
            elif isinstance(value, torch.fx.Node):
                slots.append(("input", position[value]))
            else:
                slots.append(("constant", value))
        return cls(str(module.target), [position[node] for node in module.args], slots)

    def bind(self, call: FallbackPartition) -> Callable[..., Any]:
        """Returns the graph as a function of all its inputs."""
        pick, slots = picker(self.pick), self.slots
        if slots == [("result", i) for i in range(len(slots))]:
            return lambda *args: call.results(pick(args))

        def run(*args: Any) -> tuple[Any, ...]:
            results = call.results(pick(args))
            sources = {"result": results, "input": args}
            return tuple(ref if kind == "constant" else sources[kind][ref] for kind, ref in slots)

        return run


def _is_passthrough(node: Any) -> bool:
    """Checks whether a node of the outer graph only unpacks a tuple."""
    return node.op == "call_function" and node.target is operator.getitem
