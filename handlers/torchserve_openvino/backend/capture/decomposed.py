"""Which operators were taken apart before partitioning, and into what: read off the lowered graph."""

from dataclasses import dataclass, field

import torch
from torch.fx import Graph

from torchserve_openvino.ops.names import does_work, op_name, where_of


@dataclass
class Decomposed:
    """One operator that was taken apart.

    Attributes:
        count: How often; two calls in one line of code that follow each other directly count once.
        into: Operators of the lowered graph that came of it.
        where: ``file:line`` of the first.
    """

    count: int = 0
    into: dict[str, int] = field(default_factory=dict)
    where: str = ""


def decomposed_ops(graph: Graph) -> dict[str, Decomposed]:
    """By the name of the operator as the model calls it.

    Args:
        graph: AOTAutograd's lowered graph, whose nodes know what they come from.
    """
    found: dict[str, Decomposed] = {}
    last: tuple[str, str] | None = None
    for node in graph.nodes:
        if node.op != "call_function" or not does_work(node):
            continue
        origin = node.meta.get("original_aten")
        if not isinstance(origin, torch._ops.OpOverload) or op_name(origin) == op_name(node.target):
            last = None
            continue
        name, trace = op_name(origin), node.meta.get("stack_trace") or ""
        entry = found.setdefault(name, Decomposed(where=where_of(node)))
        entry.count += last != (name, trace)
        part = op_name(node.target)
        entry.into[part] = entry.into.get(part, 0) + 1
        last = (name, trace)
    return found
