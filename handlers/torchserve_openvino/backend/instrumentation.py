"""Hooks for a diagnosis that needs more than the report: they leave nodes out and observe graphs and calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from torchserve_openvino.backend.partitioning.partition import Partitioned
    from torchserve_openvino.backend.runtime.execute import FallbackPartition
    from torchserve_openvino.report.records import GraphRecord


@dataclass(frozen=True)
class Observation:
    """A lowered graph as it was built for one set of weights.

    Attributes:
        lowered: AOTAutograd's graph, weights as placeholders; not to be changed.
        partitioned: The outer graph, its parts and what was left out.
        calls: Maps the name of each part to what the outer graph calls.
        record: The graph's record in the report.
    """

    lowered: "GraphModule"
    partitioned: "Partitioned"
    calls: "Mapping[str, FallbackPartition]"
    record: "GraphRecord"


@dataclass(frozen=True)
class Instrumentation:
    """Hooks of one compiled model. With ``leave_out`` the cache must be off, because its keys do not include it.

    Attributes:
        leave_out: Returns the reason to keep a node of a lowered graph in eager PyTorch (counted as ``disabled_op``),
            or None. Called for every node; a node has the same name in every compilation.
        observe: Called with each graph once it is built.
        called: Called with the arguments of each call of a graph, weights included, before it runs.
    """

    leave_out: "Callable[[Node], str | None] | None" = None
    observe: Callable[[Observation], None] | None = None
    called: Callable[[Observation, Sequence[Any]], None] | None = None

    def watch(self, observation: Observation, run: Callable[..., Any]) -> Callable[..., Any]:
        """Passes a built graph to ``observe``; returns ``run``, preceded by ``called`` if that is set."""
        if self.observe is not None:
            self.observe(observation)
        called = self.called
        if called is None:
            return run

        def watched(*args: Any) -> Any:
            called(observation, args)
            return run(*args)

        return watched


NOT_INSTRUMENTED = Instrumentation()
