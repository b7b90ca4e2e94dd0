"""Records in the report what Dynamo did with each frame of one model, and what ran outside any graph.

Dynamo's outcome for each frame is reported in the calling thread (`_torch_private.watch_frames`), so that models that
compile at the same time don't get each other's records.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.routes.frozen import CallRecorder
from torchserve_openvino.backend.spec import is_plain
from torchserve_openvino.backend.upstream._torch_modes import OperatorCount
from torchserve_openvino.backend.upstream._torch_private import (
    FrameFact,
    GraphBreakFact,
    LostFrame,
    changed_object,
)
from torchserve_openvino.config.vocabulary import FallbackKind
from torchserve_openvino.ops.names import op_name
from torchserve_openvino.ops.rule_registry import computes
from torchserve_openvino.report.records import GraphRecord, PartitionRecord
from torchserve_openvino.report.tracker import Tracker

logger = logging.getLogger(__name__)


class FrameLog:
    """Records one model's guarded calls.

    Args:
        tracker: Collects the records.
        recorder: Counts the graphs and lost frames of the calls.
        foreign: Name of a backend that is not ours, whose graphs are counted here.
    """

    def __init__(self, tracker: Tracker, recorder: CallRecorder, foreign: str | None = None) -> None:
        self._tracker = tracker
        self._thread = recorder
        self._foreign = foreign
        self._events = 0
        # Whether Dynamo reported nothing new during the last call whose operators were counted.
        self._settled = foreign is not None
        # Kinds of calls in which something new happened while operators were not counted: the next ones are counted.
        self._overlooked: set[Any] = set()

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Makes a call through Dynamo; counts it as a fallback if it ran no graph at all."""
        return self._tracker.call.run(lambda: self._run(call, args, kwargs))

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        thread = self._thread
        before = thread.graph_calls + thread.lost_frames
        if not self._settled or (self._overlooked and _kind(args, kwargs) in self._overlooked):
            result = self._observed(call, args, kwargs)
        else:
            events = self._events
            result = call(*args, **kwargs)
            if self._events != events and self._foreign is None:
                self._overlooked.add(_kind(args, kwargs))
        if thread.graph_calls + thread.lost_frames == before and self._foreign is None:
            self._count_eager_call()
        return result

    def _observed(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call and counts its operators outside graphs, at microseconds each, until nothing new happens."""
        thread, events = self._thread, self._events
        counts: Counter[Any] = Counter()

        def count(op: Any) -> None:
            if not thread.in_graph:
                counts[op] += 1

        with OperatorCount(count):
            result = call(*args, **kwargs)
        self._tracker.add_outside({op_name(op): number for op, number in counts.items() if computes(op)})
        self._settled = self._events == events
        if self._settled and self._overlooked:
            self._overlooked.discard(_kind(args, kwargs))
        return result

    def _count_eager_call(self) -> None:
        """Counts a call for which Dynamo skipped the model, by itself or on request."""
        reason = "Dynamo ran this call without any compiled graph"
        if self._tracker.add_fallback("graph_break", "whole call", reason=reason):
            logger.warning("Fallback: a whole call ran in eager PyTorch: %s", reason)

    # --- called by Dynamo -----------------------------------------------------------------------------------------

    def compiled(self, fact: FrameFact) -> None:
        """See `FrameObserver`."""
        self._note_event()
        tracker = self._tracker
        if fact.recompile_reason:
            tracker.add_recompile(fact.where, fact.recompile_reason, fact.compile_id)
        graph, self._thread.newest = self._thread.newest, None
        if graph is not None:
            objects = {effect: changed_object(effect) for effect in fact.side_effects}
            if lasting := [effect for effect, changed in objects.items() if changed is None]:
                graph.unproven = f"the model keeps state: it changes {', '.join(lasting)}"
            # An attribute that is set and then reset is not state. This runs before the code that Dynamo just compiled.
            graph.touched = [
                (effect, changed, dict(vars(changed))) for effect, changed in objects.items() if changed is not None
            ]
        if self._foreign is not None and fact.ops:
            record = tracker.add_graph(GraphRecord(fact.compile_id, fact.where, "inference", fact.ops))
            record.partitions.append(PartitionRecord(self._foreign, fact.ops, runs_on=self._foreign))

    def broke(self, fact: GraphBreakFact) -> None:
        """See `FrameObserver`."""
        self._note_event()
        count_graph_break(self._tracker, fact)

    def lost(self, frame: LostFrame, first: bool) -> None:
        """See `FrameObserver`."""
        if first:
            self._note_event()
            self._tracker.call.added(frame.forget)
        self._thread.newest = None
        self._thread.lost_frames += 1
        kind: FallbackKind = "graph_break" if frame.is_break else "conversion_failed"
        name = frame.where or "a function"
        if self._tracker.add_fallback(kind, name, reason=frame.reason, where=frame.where):
            # Eager PyTorch is yet to run the frame, and may reject the call.
            self._tracker.call.when_answered(
                lambda: logger.warning("Fallback: %s runs in eager PyTorch at each call: %s", name, frame.reason)
            )

    def _note_event(self) -> None:
        self._events += 1
        self._settled = self._foreign is not None


def count_graph_break(tracker: Tracker, fact: GraphBreakFact) -> None:
    """Records a line at which tracing stopped; the code at it runs in eager PyTorch."""
    tracker.add_fallback("graph_break", "python", reason=fact.reason, where=fact.where)


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a key that is equal for calls with the same operators, as far as shapes, types and numbers decide it."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    parts = [_of_leaf(leaf) for leaf in leaves]
    return spec, torch.is_grad_enabled(), *parts


def _of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and is_plain(leaf):
        return leaf.shape, leaf.dtype
    return repr(leaf) if leaf is None or isinstance(leaf, (bool, int, float, str)) else type(leaf)
