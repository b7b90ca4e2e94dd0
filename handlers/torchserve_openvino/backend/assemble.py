"""The outer graph and its compiled partitions, put together to one function."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchserve_openvino.backend.execute import GuardedPartition
from torchserve_openvino.backend.partition import is_passthrough


def picker(positions: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A fast ``args -> tuple`` of the arguments at ``positions``."""
    if not positions:
        return lambda args: ()
    if len(positions) == 1:
        (only,) = positions
        return lambda args: (args[only],)
    return itemgetter(*positions)


def assemble(outer: GraphModule, calls: dict[str, GuardedPartition]) -> Callable[..., Any]:
    """The outer graph as a function, with its ``call_module`` nodes bound to ``calls``."""
    whole = _assemble_whole(outer, calls)
    if whole is not None:
        return whole
    root: dict[str, Any] = dict(calls)
    for node in outer.graph.find_nodes(op="get_attr"):
        root[str(node.target)] = getattr(outer, str(node.target))
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(outer.graph, {}))
    return GraphModule(root, graph).forward


def _assemble_whole(outer: GraphModule, calls: dict[str, GuardedPartition]) -> Callable[..., Any] | None:
    """A direct call where one partition is the whole graph; None where more stands in it."""
    inner = [node for node in outer.graph.nodes if node.op not in {"placeholder", "output"}]
    modules = [node for node in inner if node.op == "call_module"]
    if len(modules) != 1 or any(node is not modules[0] and not is_passthrough(node) for node in inner):
        return None
    (module,) = modules
    call = calls[str(module.target)]
    position = {node: i for i, node in enumerate(outer.graph.find_nodes(op="placeholder"))}
    pick = picker([position[node] for node in module.args])
    # An output is a result of the partition, an input that is passed through, or None.
    slots: list[tuple[str, Any]] = []
    (output,) = outer.graph.find_nodes(op="output")
    for value in output.args[0]:
        if value is module:
            slots.append(("result", 0))
        elif isinstance(value, Node) and is_passthrough(value):
            slots.append(("result", value.args[1]))
        elif isinstance(value, Node):
            slots.append(("input", position[value]))
        else:
            slots.append(("constant", value))
    if slots == [("result", i) for i in range(len(slots))]:
        return lambda *args: call.results(pick(args))

    def run(*args: Any) -> tuple[Any, ...]:
        results = call.results(pick(args))
        sources = {"result": results, "input": args}
        return tuple(ref if kind == "constant" else sources[kind][ref] for kind, ref in slots)

    return run
