"""Checks that the report accounts for everything that PyTorch itself computed in a compiled call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import torchserve_openvino as tov
from torchserve_openvino.backend.upstream._torch_modes import OperatorCount
from torchserve_openvino.ops.names import op_name, packets
from torchserve_openvino.ops.rule_registry import Movement, rules_that

# Operators that the backend itself runs on arguments and outputs: memory, copies, checks of integers.
_OWN = frozenset(rules_that(lambda rule: rule.movement is Movement.REARRANGES)) | packets(
    "_has_same_storage_numel _local_scalar_dense aminmax copy_ detach_ empty empty_like empty_permuted "
    "empty_strided fill_ full "
    "is_nonzero item lift_fresh resize_ set_ sym_numel sym_size sym_stride sym_storage_offset zero_"
)

# Sizes decide which of these a recurrent layer outside graphs runs; the report lists those of one observed call.
_PRODUCTS = packets("addmm bmm mkldnn_rnn_layer mm")


def _is_product(name: str) -> bool:
    return name.rpartition(".")[0] in _PRODUCTS


def _is_composite(name: str) -> bool:
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace, None), packet, None), overload or "default", None)
    return isinstance(op, torch._ops.OpOverload) and op._can_decompose()


class Books:
    """Compares what ran with what the report counts.

    Args:
        call: The compiled model; anything else is not checked.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._compiled = call if isinstance(call, tov.CompiledModule) else None
        self._known: set[Any] = set()
        self.problem = ""

    @contextmanager
    def look_at(self, sizes: Any) -> Iterator[None]:
        """Watches one call; the first call with these sizes may compile, which runs operators of its own."""
        if self._compiled is None:
            yield
            return
        ran: set[str] = set()
        calls, fallbacks, builds = self._graph_calls(), self._fallbacks(), self._builds()

        def note(op: Any) -> None:
            computes = isinstance(op, torch._ops.OpOverload) and not op.is_view and op.namespace != "prim"
            if computes and str(op.overloadpacket) not in _OWN:
                ran.add(op_name(op))

        with OperatorCount(note):
            yield
        grew = self._fallbacks() > fallbacks
        if not grew and calls == self._graph_calls() and not self._compiled.frozen:
            self.problem = "no graph ran and no fallback was counted"
        counted = self._told()
        untold = ran - counted
        repeated = sizes in self._known and self._builds() == builds
        if any(map(_is_product, counted)):
            untold = {op for op in untold if not _is_product(op)}
        # A reported composite operator runs as the operators it is made of.
        made_of_others = any(map(_is_composite, counted)) or "aten.mkldnn_rnn_layer.default" in counted
        if repeated and untold and not grew and not made_of_others:
            self.problem = f"PyTorch ran {', '.join(sorted(untold))}; the report says nothing of it"
        self._known.add(sizes)

    def forget(self) -> None:
        """Weights changed: the next call builds again."""
        self._known.clear()

    def _graph_calls(self) -> int:
        # No public counter exists for a single call; the package's own accounting uses this one.
        assert self._compiled is not None
        return int(self._compiled._runner._settings.recorder.graph_calls)

    def _fallbacks(self) -> int:
        assert self._compiled is not None
        return sum(fallback.count for fallback in self._compiled.report.tracker.fallbacks)

    def _builds(self) -> tuple[int, int]:
        assert self._compiled is not None
        graphs = self._compiled.report.tracker.graphs
        return len(graphs), sum(part.builds for graph in graphs for part in graph.partitions)

    def _told(self) -> set[str]:
        """Names of the reported operators, with all of a partition that runs in eager."""
        assert self._compiled is not None
        tracker = self._compiled.report.tracker
        counted = {fallback.op for fallback in tracker.fallbacks} | set(tracker.outside)
        for graph in tracker.graphs:
            counted |= set(graph.left_out)
            for part in graph.partitions:
                if part.runs_on != "openvino":
                    counted |= set(part.op_counts)
        return counted
