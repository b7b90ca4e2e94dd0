"""Finds in the lowered graph which operators were decomposed before partitioning, and into what."""

from dataclasses import dataclass, field

import torch
from torch.fx import Graph

from torchserve_openvino.ops.names import does_work, op_name, where_of


@dataclass
class Decomposed:
    """An operator that was decomposed.

    Attributes:
        count: Number of calls; two consecutive calls in the same line of code count once.
        into: Maps each resulting operator of the lowered graph to its number of nodes.
        where: ``file:line`` of the first call.
    """

    count: int = 0
    into: dict[str, int] = field(default_factory=dict)
    where: str = ""


def decomposed_ops(graph: Graph) -> dict[str, Decomposed]:
    """Returns the decomposed operators by the names under which the model calls them.

    Args:
        graph: AOTAutograd's lowered graph, whose nodes record the operators that they come from.
    """
    by_name: dict[str, Decomposed] = {}
    last: tuple[str, str] | None = None
    for node in graph.nodes:
        if node.op != "call_function" or not does_work(node):
            continue
        origin = node.meta.get("original_aten")
        if not isinstance(origin, torch._ops.OpOverload) or op_name(origin) == op_name(node.target):
            last = None
            continue
        name, trace = op_name(origin), node.meta.get("stack_trace") or ""
        entry = by_name.setdefault(name, Decomposed(where=where_of(node)))
        entry.count += last != (name, trace)
        part = op_name(node.target)
        entry.into[part] = entry.into.get(part, 0) + 1
        last = (name, trace)
    return by_name
