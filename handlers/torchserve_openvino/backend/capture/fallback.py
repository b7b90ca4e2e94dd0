"""Runs a subgraph that OpenVINO could not compile: in eager PyTorch, or with Inductor if the user chose it."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchserve_openvino.backend.partitioning.partition import Part
from torchserve_openvino.backend.partitioning.views import is_view
from torchserve_openvino.backend.runtime.execute import as_traced
from torchserve_openvino.backend.settings import BackendSettings
from torchserve_openvino.backend.spec import ValueSpec, spec_of
from torchserve_openvino.ops.names import value_of

logger = logging.getLogger(__name__)


def fallback_for(part: Part, settings: BackendSettings) -> Callable[..., Any]:
    """Returns the subgraph as a function.

    Args:
        part: The subgraph.
        settings: Selects where it runs; its tracker counts a failure of Inductor itself.
    """
    if settings.fallback_to != "inductor":
        return laid_out(part.graph)
    return _InductorThenEager(part, settings)


def laid_out(graph: GraphModule) -> Callable[..., Any]:
    """Returns a graph as a function whose results have the traced memory order (`execute.as_traced`)."""
    (output,) = graph.graph.find_nodes(op="output")
    nodes, several = output.args[0], isinstance(output.args[0], (list, tuple))
    specs = [_spec(node) for node in (nodes if several else [nodes])]

    def run(*args: Any) -> Any:
        answer = graph(*args)
        results = [
            result if spec is None else as_traced(result, spec)
            for result, spec in zip(answer if several else [answer], specs, strict=True)
        ]
        return results if several else results[0]

    return run


def _spec(node: Any) -> ValueSpec | None:
    """Returns the spec of a strided tensor that a node computes, else None; a view keeps the memory it is based on."""
    value = value_of(node) if isinstance(node, Node) and node.op == "call_function" and not is_view(node) else None
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return spec_of(value) if strided else None


class _InductorThenEager:
    """A subgraph that Inductor compiles at the first call; if it fails, that is counted and eager runs from then on."""

    def __init__(self, part: Part, settings: BackendSettings) -> None:
        self._part = part
        self._settings = settings
        self._run: Callable[..., Any] = torch.compile(part.graph, backend="inductor", dynamic=None)
        self._proven = False

    def __call__(self, *args: Any) -> Any:
        if self._proven:
            return self._run(*args)
        try:
            result = self._run(*args)
        except Exception as error:
            self._settings.tracker.add_fallback("compile_failed", self._part.name, reason=f"inductor: {error}")
            logger.warning("Fallback: inductor failed for %s, eager is used: %s", self._part.name, error)
            self._run = laid_out(self._part.graph)
            result = self._run(*args)
        self._proven = True
        return result
