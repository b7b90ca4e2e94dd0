"""Runs a lowered graph: each set of options compiles it, and each set of weights has its own compiled partitions.

Dynamo uses one graph for several modules of the same code, and does not notice when a weight changes. The first call
with a set of weights builds a variant with them as constants; `WeightWatch` checks at each call whether it is still
valid. If weights keep changing, or there are too many sets, one variant takes them as inputs: slower, always correct.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from torchserve_openvino.backend.backend_settings import BackendSettings
from torchserve_openvino.backend.capture.builder import Assembled, GraphBuilder
from torchserve_openvino.backend.routes.frozen import GraphCall, Touched, Unverified
from torchserve_openvino.backend.runtime.assemble import picker
from torchserve_openvino.backend.runtime.weight_watch import WeightWatch, can_watch
from torchserve_openvino.backend.upstream._torch_private import GraphFacts, reads_values
from torchserve_openvino.errors import TorchServeOpenVINOError
from torchserve_openvino.report.records import GraphRecord

logger = logging.getLogger(__name__)

# Most modules that may share one graph: a 48-layer transformer with a graph break in each layer needs 48.
MAX_VARIANTS = 64
# If weights change more often than this, compiling each time is not worth it.
MAX_REBUILDS = 4
REBUILDS_WITHIN_SECONDS = 60.0


@dataclass
class Variant:
    """The graph compiled for one set of weights.

    Attributes:
        watch: None if weights are inputs, or were released.
        unverified: Set until a result was compared with eager PyTorch, with the option ``verify``.
    """

    assembled: Assembled
    watch: WeightWatch | None
    unverified: Unverified | None = None


@dataclass(eq=False)
class Lowered:
    """A graph as AOTAutograd lowered it, whatever compiles it.

    Attributes:
        gm: The graph.
        facts: Which inputs are weights, and which the graph mutates.
        record: What every report says of it; the others' partitions are left out.
        unproven: Why the graph must not be called without the Python code around it; empty if it may be.
        touched: Objects that this Python code changes, with their attributes before the first call.
    """

    gm: GraphModule
    facts: GraphFacts
    record: GraphRecord
    unproven: str = ""
    touched: list[Touched] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unproven = reads_values(self.gm)


class SharedGraph:
    """A lowered graph that is compiled once for each of the settings that call it.

    Args:
        lowered: The graph.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self._compiled: dict[int, CompiledGraph] = {}

    def compiled(self, settings: BackendSettings) -> "CompiledGraph":
        """Returns the graph as it is compiled for these settings; adds it to their report at first."""
        graph = self._compiled.get(id(settings))
        if graph is None:
            record = settings.tracker.add_graph(replace(self.lowered.record, partitions=[], left_out={}))
            try:
                graph = CompiledGraph(self.lowered, settings, record)
            except Exception:
                settings.tracker.drop_graph(record)
                raise
            self._compiled[id(settings)] = graph
            graph.report_left_out()
        return graph

    def known_to(self, settings: BackendSettings) -> "CompiledGraph | None":
        """Returns the graph as it was compiled for these settings; None if it was not."""
        return self._compiled.get(id(settings))


class CompiledGraph:
    """A lowered graph, compiled with some settings; called with a list of all inputs, weights included.

    Args:
        lowered: The graph.
        settings: Settings of this model.
        record: The graph's record in the report.

    Attributes:
        record: As above.
    """

    def __init__(self, lowered: Lowered, settings: BackendSettings, record: GraphRecord) -> None:
        # Keeps the settings alive, and with them their identity in `SharedGraph`.
        self._settings = settings
        self.record = record
        self._lowered, facts = lowered, lowered.facts
        self._static = sorted(facts.static - facts.mutated)
        self._mutates = bool(facts.mutated)
        self._pick: Callable[[Sequence[Any]], tuple[Any, ...]] = picker(self._static)
        self._lock = threading.RLock()
        self._thread = settings.recorder
        self._current: Variant | None = None
        self._variants: dict[tuple[int, ...], Variant] = {}
        self._rebuilds = 0
        self._rebuilt = 0.0
        self._builder = GraphBuilder(lowered.gm, settings, record)

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
            result = self._run(args)
        finally:
            thread.in_graph -= 1
        tracker = self._settings.tracker
        if tracker.dropped and self.record.index in tracker.dropped:
            # Its first call was rejected.
            tracker.restore_graph(self.record)
        return result

    def _run(self, args: list[Any]) -> Any:
        variant = self._current
        weights = self._pick(args)
        if variant is None or not _holds(variant, weights):
            variant = self._select(args, weights)
        call_args = tuple(args)
        args.clear()
        assembled = variant.assembled
        if variant.unverified is not None and not variant.unverified.verified:
            results = self._run_unverified(variant.unverified, assembled, call_args)
        else:
            results = assembled.run(*call_args)
        if (calls := self._thread.recorded) is not None:
            lowered, blueprint = self._lowered, assembled.blueprint
            calls.append(
                GraphCall(
                    assembled.run, call_args, results, self._mutates, blueprint, lowered.unproven, lowered.touched
                )
            )
        return results

    def _run_unverified(self, unverified: Unverified, assembled: Assembled, args: tuple[Any, ...]) -> Any:
        """Runs a graph that is yet to be compared with eager PyTorch: with the call it is part of, or by itself."""
        tracker, waiting = self._settings.tracker, self._thread.unverified
        generator, failures = torch.get_rng_state(), tracker.fallback_counts().get("runtime_failed", 0)
        results = assembled.run(*args)
        unverified.failed = tracker.fallback_counts().get("runtime_failed", 0) != failures
        by_itself = self._mutates or self._lowered.unproven or self.record.stage == "backward"
        if waiting is not None and not by_itself:
            waiting.append(unverified)
        elif not unverified.failed:
            after = torch.get_rng_state()
            torch.set_rng_state(generator)
            with torch.no_grad():
                expected = self._builder.in_eager(*args)
            torch.set_rng_state(after)
            self._settings.comparison.compare(results, expected, f"graph {self.record.index}")
            unverified.verified = True
        return results

    def _variant(self, assembled: Assembled, watch: WeightWatch | None) -> Variant:
        return Variant(assembled, watch, Unverified() if self._settings.resolved.options.verify == "first" else None)

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
                variant = self._variant(self._build(constants), watch)
                self._variants[key] = variant
            self._current = variant
            return variant

    def _build(self, weights: dict[int, Any]) -> Assembled:
        try:
            built = self._builder.build(weights)
        except TorchServeOpenVINOError:
            raise
        except Exception as error:
            built = self._builder.eagerly(error)
        if not self._settings.tracker.notes_runs:
            return built
        run, ran, index = built.run, self._settings.tracker.ran, self.record.index

        def noted(*args: Any) -> Any:
            ran.add(index)
            return run(*args)

        return replace(built, run=noted)

    def _count_rebuild(self) -> None:
        """Counts rebuilds in quick succession; the count starts over for a model that is reloaded only now and then."""
        now = time.monotonic()
        self._rebuilds = self._rebuilds + 1 if now - self._rebuilt < REBUILDS_WITHIN_SECONDS else 1
        self._rebuilt = now

    def _narrow(self, static: list[int]) -> None:
        """Limits the weights to ``static``; inputs that can't be watched are passed at each call."""
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
            f"graph {self.record.index}: weights change too often (or belong to more than {MAX_VARIANTS} modules) "
            "to be constants; they are passed at each call"
        )
        self._static, self._pick = [], picker([])
        self._variants.clear()
        return self._variant(self._build({}), None)

    def release_weights(self) -> None:
        """Drops everything that keeps the weights' memory alive."""
        with self._lock:
            for variant in self._variants.values():
                variant.watch = None

    def drop(self) -> None:
        """Frees every compiled partition; the next call builds them again."""
        with self._lock:
            self._variants.clear()
            self._current = None


def _holds(variant: Variant, weights: tuple[Any, ...]) -> bool:
    watch = variant.watch
    return watch is None or (watch.same_objects(weights) and watch.unchanged(weights))
