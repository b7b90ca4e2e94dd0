"""Times each node of a graph by running it node by node on the arguments of a real call."""

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from torchserve_openvino.doctor.target import SampleCall

# Enough for a median; a slow graph runs only as often as the budget allows.
REPETITIONS = 9
BUDGET_SECONDS = 3.0


class _Timed(Interpreter):
    """Runs a graph and records the seconds of each node in each run."""

    def __init__(self, graph: GraphModule, calls: Mapping[str, Any], names: frozenset[str]) -> None:
        super().__init__(graph)
        self._calls = calls
        self._wanted = names
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.arguments: dict[str, SampleCall] = {}

    def run_node(self, n: Node) -> Any:
        if n.name in self._wanted and n.name not in self.arguments:
            self.arguments[n.name] = SampleCall(*self.fetch_args_kwargs_from_env(n))
        start = time.perf_counter()
        result = super().run_node(n)
        self.seconds[n.name].append(time.perf_counter() - start)
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._calls[target](*args)


class NodeTimes:
    """Result of `time_nodes`.

    Attributes:
        seconds: Median time of each node, by its name.
        arguments: Arguments of the nodes in ``wanted``, by their names.
    """

    def __init__(self, seconds: Mapping[str, float], arguments: Mapping[str, SampleCall]) -> None:
        self.seconds = seconds
        self.arguments = arguments


def time_nodes(
    graph: GraphModule,
    args: Sequence[Any],
    calls: Mapping[str, Any] | None = None,
    names: frozenset[str] = frozenset(),
) -> NodeTimes:
    """Runs a functional graph several times and takes the median time of each node.

    Args:
        graph: It must not change its inputs.
        args: One value for each placeholder.
        calls: What its ``call_module`` nodes run, by their target.
        wanted: Names of nodes whose arguments are kept.
    """
    timed = _Timed(graph, calls or {}, names)
    start = time.perf_counter()
    with torch.inference_mode():
        # The first run does not count: it includes one-time allocations and choices.
        timed.run(*args)
        timed.seconds.clear()
        for _ in range(REPETITIONS):
            timed.run(*args)
            if time.perf_counter() - start > BUDGET_SECONDS:
                break
    return NodeTimes({name: statistics.median(times) for name, times in timed.seconds.items()}, timed.arguments)
