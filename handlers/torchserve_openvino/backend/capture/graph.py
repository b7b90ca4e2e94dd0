"""A lowered graph that runs: for each set of weights a variant with its own compiled partitions.

Dynamo hands one graph to several modules of the same code, and does not notice when a weight changes. The first call
with a set of weights builds a variant with those as constants; `WeightWatch` tells at each call whether it still holds.
Where weights keep changing or are too many, one variant takes them as inputs instead: slower, and always right.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from torchserve_openvino.backend.capture.builder import Assembled, GraphBuilder
from torchserve_openvino.backend.routes.frozen import GraphCall, Touched
from torchserve_openvino.backend.runtime.assemble import picker
from torchserve_openvino.backend.runtime.weights import WeightWatch, can_watch
from torchserve_openvino.backend.settings import BackendSettings
from torchserve_openvino.backend.upstream._torch_private import GraphFacts, reads_values
from torchserve_openvino.errors import TorchServeOpenVINOError
from torchserve_openvino.report.tracker import GraphRecord

logger = logging.getLogger(__name__)

# Modules that share one graph: a 48-layer transformer with a graph break in each layer needs 48.
MAX_VARIANTS = 64
# A weight that changes more often than this is not worth a compilation each time.
MAX_REBUILDS = 4
REBUILDS_WITHIN_SECONDS = 60.0


@dataclass
class Variant:
    """One set of weights, compiled. ``watch`` is None where weights are inputs."""

    assembled: Assembled
    watch: WeightWatch | None


class CompiledGraph:
    """What the backend returns to AOTAutograd; called with a list of all inputs, weights included.

    Args:
        gm: The lowered graph.
        facts: Which inputs are weights, and which the graph changes.
        settings: Of this model.
        record: The graph's record in the report.

    Attributes:
        unproven: What speaks against calling the graph without the Python around it; empty where nothing does.
        touched: Objects that this Python changes, with their attributes before the first call.
    """

    def __init__(self, gm: GraphModule, facts: GraphFacts, settings: BackendSettings, record: GraphRecord) -> None:
        self._settings = settings
        self._record = record
        self.unproven = reads_values(gm)
        self.touched: list[Touched] = []
        self._static = sorted(facts.static - facts.mutated)
        self._mutates = bool(facts.mutated)
        self._pick: Callable[[Sequence[Any]], tuple[Any, ...]] = picker(self._static)
        self._lock = threading.RLock()
        self._thread = settings.recorder
        self._current: Variant | None = None
        self._variants: dict[tuple[int, ...], Variant] = {}
        self._rebuilds = 0
        self._rebuilt = 0.0
        self._builder = GraphBuilder(gm, settings, record)

    def report_left_out(self) -> None:
        """See `GraphBuilder.report_left_out`."""
        self._builder.report_left_out()

    def __call__(self, args: list[Any]) -> Any:
        """Runs the graph.

        Args:
            args: Inputs in the graph's order; emptied, as AOTAutograd expects of a boxed function.
        """
        thread = self._thread
        thread.graph_calls += 1
        thread.in_graph += 1
        try:
            return self._run(args)
        finally:
            thread.in_graph -= 1

    def _run(self, args: list[Any]) -> Any:
        variant = self._current
        weights = self._pick(args)
        if variant is None or not _holds(variant, weights):
            variant = self._select(args, weights)
        call_args = tuple(args)
        args.clear()
        assembled = variant.assembled
        results = assembled.run(*call_args)
        if (calls := self._thread.recorded) is not None:
            calls.append(
                GraphCall(
                    assembled.run, call_args, results, self._mutates, assembled.blueprint, self.unproven, self.touched
                )
            )
        return results

    def _select(self, args: Sequence[Any], weights: tuple[Any, ...]) -> Variant:
        with self._lock:
            key = tuple(map(id, weights))
            variant = self._variants.get(key)
            if variant is not None and _holds(variant, weights):
                self._current = variant
                return variant
            if variant is not None:
                self._count_rebuild()
                del self._variants[key]
            if self._rebuilds > MAX_REBUILDS or len(self._variants) >= MAX_VARIANTS:
                variant = self._without_constants(args)
            else:
                watch = WeightWatch([w for w in weights if can_watch(w)], lambda: self._forget(key))
                constants = {i: args[i] for i in self._static if can_watch(args[i])}
                if len(constants) < len(self._static):
                    self._narrow(list(constants))
                    return self._select(args, self._pick(args))
                variant = Variant(self._build(constants), watch)
                self._variants[key] = variant
            self._current = variant
            return variant

    def _build(self, weights: dict[int, Any]) -> Assembled:
        try:
            return self._builder.build(weights)
        except TorchServeOpenVINOError:
            raise
        except Exception as error:
            return self._builder.eagerly(error)

    def _count_rebuild(self) -> None:
        """Rebuilds in quick succession add up; a model that is reloaded now and then starts from 0 each time."""
        now = time.monotonic()
        self._rebuilds = self._rebuilds + 1 if now - self._rebuilt < REBUILDS_WITHIN_SECONDS else 1
        self._rebuilt = now

    def _narrow(self, static: list[int]) -> None:
        """Takes inputs that can't be watched out of the weights."""
        self._settings.tracker.add_note(
            "a weight is an inference tensor, whose changes cannot be noticed: it is passed at each call"
        )
        self._static, self._pick = static, picker(static)
        self._variants.clear()

    def _forget(self, key: tuple[int, ...]) -> None:
        # Runs while a weight is being freed, in any thread: dictionary and attribute writes only.
        variant = self._variants.pop(key, None)
        if variant is not None and self._current is variant:
            self._current = None

    def _without_constants(self, args: Sequence[Any]) -> Variant:
        self._settings.tracker.add_note(
            f"graph {self._record.index}: weights change too often (or belong to more than {MAX_VARIANTS} modules) "
            "to be constants; they are passed at each call"
        )
        self._static, self._pick = [], picker([])
        self._variants.clear()
        return Variant(self._build({}), None)

    def release_weights(self) -> None:
        """Lets go of everything that keeps the weights' memory."""
        with self._lock:
            for variant in self._variants.values():
                variant.watch = None

    def drop(self) -> None:
        """Frees every compiled partition; a further call builds them again."""
        with self._lock:
            self._variants.clear()
            self._current = None


def _holds(variant: Variant, weights: tuple[Any, ...]) -> bool:
    watch = variant.watch
    return watch is None or (watch.same_objects(weights) and watch.unchanged(weights))
