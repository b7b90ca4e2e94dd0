"""A lowered graph that runs: for each set of weights a variant with its own compiled partitions.

Dynamo hands one graph to several modules of the same code, and does not notice when a weight changes. The first call
with a set of weights builds a variant with those as constants; `WeightWatch` tells at each call whether it still holds.
Where weights keep changing or are too many, one variant takes them as inputs instead: slower, and always right.
"""

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchserve_openvino.backend._torch_private import GraphFacts
from torchserve_openvino.backend.assemble import assemble, picker
from torchserve_openvino.backend.build import build, effective_precision
from torchserve_openvino.backend.convert import ConversionError, Converted, convert
from torchserve_openvino.backend.execute import CompiledPartition, GuardedPartition
from torchserve_openvino.backend.fallback import fallback_for
from torchserve_openvino.backend.frozen import GraphCall
from torchserve_openvino.backend.partition import Part, Partitioned, partition
from torchserve_openvino.backend.settings import BackendSettings
from torchserve_openvino.backend.weights import WeightWatch, can_freeze
from torchserve_openvino.errors import IntegerRangeError, WeightsReleasedError
from torchserve_openvino.ops import Refusal, op_name
from torchserve_openvino.report.tracker import GraphRecord, PartitionRecord

logger = logging.getLogger(__name__)

# Modules that share one graph: a 48-layer transformer with a graph break in each layer needs 48.
MAX_VARIANTS = 64
# A weight that changes more often than this is not worth a compilation each time.
MAX_REBUILDS = 4
REBUILDS_WITHIN_SECONDS = 60.0


@dataclass
class Variant:
    """One set of weights, compiled. ``watch`` is None where weights are inputs."""

    run: Callable[..., Any]
    watch: WeightWatch | None


class CompiledGraph:
    """What the backend returns to AOTAutograd; called with a list of all inputs, weights included.

    Args:
        gm: The lowered graph.
        facts: Which inputs are weights, and which the graph changes.
        settings: Of this model.
        record: The graph's record in the report.
    """

    def __init__(self, gm: GraphModule, facts: GraphFacts, settings: BackendSettings, record: GraphRecord) -> None:
        self._gm = gm
        self._settings = settings
        self._record = record
        self._static = sorted(facts.static - facts.mutated)
        self._mutates = bool(facts.mutated)
        self._pick: Callable[[Sequence[Any]], tuple[Any, ...]] = picker(self._static)
        self._refused: dict[str, Refusal] = {}
        self._lock = threading.RLock()
        self._thread = settings.tracker.thread
        self._current: Variant | None = None
        self._variants: dict[tuple[int, ...], Variant] = {}
        self._rebuilds = 0
        self._rebuilt = 0.0
        self._released = False
        self._partitioned = self._partition()

    def __call__(self, args: list[Any]) -> Any:
        """Runs the graph.

        Args:
            args: Inputs in the graph's order; emptied, as AOTAutograd expects of a boxed function.
        """
        self._thread.graph_calls += 1
        variant = self._current
        weights = self._pick(args)
        if variant is None or not _holds(variant, weights):
            variant = self._select(args, weights)
        call_args = tuple(args)
        args.clear()
        results = variant.run(*call_args)
        if (calls := self._thread.recording) is not None:
            calls.append(GraphCall(variant.run, call_args, results, self._mutates))
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
                watch = WeightWatch([w for w in weights if can_freeze(w)], lambda: self._forget(key))
                frozen = {i: args[i] for i in self._static if can_freeze(args[i])}
                if len(frozen) < len(self._static):
                    self._narrow(list(frozen))
                    return self._select(args, self._pick(args))
                variant = Variant(self._build(frozen), watch)
                self._variants[key] = variant
            self._current = variant
            return variant

    def _count_rebuild(self) -> None:
        """Rebuilds in quick succession add up; a model that is reloaded now and then starts from 0 each time."""
        now = time.monotonic()
        self._rebuilds = self._rebuilds + 1 if now - self._rebuilt < REBUILDS_WITHIN_SECONDS else 1
        self._rebuilt = now

    def _narrow(self, static: list[int]) -> None:
        """Takes inputs that can't be watched out of the weights."""
        self._settings.tracker.add_note(
            "a weight is an inference tensor, whose changes can't be noticed: it is passed at each call"
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

    # --- building ---------------------------------------------------------------------------------------------

    def _refuse(self, node: Node) -> Refusal | None:
        return self._refused.get(op_name(node.target)) or self._settings.support.refuse(node)

    def _partition(self) -> Partitioned:
        partitioned = partition(self._gm, self._refuse)
        self._record.ops_total = partitioned.ops_total
        self._record.left_out = dict(Counter(item.op for item in partitioned.left_out))
        self._record.partitions = [
            PartitionRecord(name=part.name, ops=part.ops, op_counts=dict(part.op_counts)) for part in partitioned.parts
        ]
        return partitioned

    def report_left_out(self) -> None:
        """Counts each node that stays in eager PyTorch, with its reason and the user's line."""
        for item in self._partitioned.left_out:
            new = self._settings.tracker.add_fallback(
                item.refusal.kind, item.op, to="eager", reason=item.refusal.reason, where=item.where
            )
            if new:
                logger.warning(
                    "Fallback: %s runs in eager PyTorch (%s: %s) at %s",
                    item.op, item.refusal.kind, item.refusal.reason, item.where or "an unknown line",
                )  # fmt: skip

    def _build(self, frozen: dict[int, torch.Tensor]) -> Callable[..., Any]:
        """Converts and compiles every partition, and puts the calls into the outer graph."""
        converted = self._convert_all(frozen)
        calls: dict[str, GuardedPartition] = {}
        for part, record in zip(self._partitioned.parts, self._record.partitions, strict=True):
            compiled = self._compile(part, converted[part.name], record)
            fallback = part.graph.forward if compiled else fallback_for(part, self._settings)
            fallback = functools.partial(self._fall_back, fallback)
            calls[part.name] = GuardedPartition(
                compiled, fallback, functools.partial(self._runtime_failed, part.name), part.returns_tuple
            )
            record.builds += 1
        self._settings.tracker.add_build()
        return assemble(self._partitioned.outer, calls)

    def _fall_back(self, run: Callable[..., Any], *args: Any) -> Any:
        if self._released:
            raise WeightsReleasedError(
                "OpenVINO failed, and PyTorch's copy of the weights was released (handler.openvino.release_weights)"
            )
        return run(*args)

    def release_weights(self) -> None:
        """Lets go of everything that keeps the weights' memory; nothing falls back to eager after it."""
        with self._lock:
            self._released = True
            for variant in self._variants.values():
                variant.watch = None

    def _convert_all(self, frozen: dict[int, torch.Tensor]) -> dict[str, Converted | None]:
        """Converts every part; an operator that turns out not to convert is left out, and all is split anew."""
        placeholders = {node: i for i, node in enumerate(self._gm.graph.find_nodes(op="placeholder"))}
        by_name = {node.name: i for node, i in placeholders.items()}
        while True:
            result: dict[str, Converted | None] = {}
            refused_now: dict[str, Refusal] = {}
            for part in self._partitioned.parts:
                try:
                    result[part.name] = convert(part, self._constants(part, frozen, by_name))
                except ConversionError as error:
                    result[part.name] = None
                    fresh = error.ops - self._refused.keys()
                    refused_now |= {op: Refusal("conversion_failed", str(error)) for op in fresh}
                    if not fresh:
                        self._part_failed("conversion_failed", part, error)
            if not refused_now:
                return result
            self._refused |= refused_now
            self._partitioned = self._partition()
            self._count_refused(refused_now)

    def _count_refused(self, refused: dict[str, Refusal]) -> None:
        for item in self._partitioned.left_out:
            if item.op in refused:
                self._settings.tracker.add_fallback(
                    "conversion_failed", item.op, to="eager", reason=item.refusal.reason, where=item.where
                )
        for op, refusal in refused.items():
            logger.warning("Fallback: %s runs in eager PyTorch, its conversion failed: %s", op, refusal.reason)

    def _constants(
        self, part: Part, frozen: dict[int, torch.Tensor], placeholders: dict[str, int]
    ) -> dict[int, torch.Tensor]:
        constants: dict[int, torch.Tensor] = {}
        for position, node in enumerate(part.arguments):
            if node.op == "get_attr":
                value = getattr(self._partitioned.outer, str(node.target))
                if isinstance(value, torch.Tensor):
                    constants[position] = value
            elif node.op == "placeholder" and placeholders[node.name] in frozen:
                constants[position] = frozen[placeholders[node.name]]
        return constants

    def _compile(self, part: Part, converted: Converted | None, record: PartitionRecord) -> CompiledPartition | None:
        settings = self._settings
        if converted is None:
            record.runs_on = settings.fallback_to
            return None
        record.convert_seconds += converted.seconds
        record.inputs, record.outputs = len(converted.inputs), len(converted.outputs)
        record.constants = len(part.arguments) - len(converted.inputs)
        record.constant_bytes = converted.constant_bytes
        try:
            built = build(converted.model, settings.device, settings.ov_config, settings.own_weights)
        except Exception as error:
            self._part_failed("compile_failed", part, error)
            record.runs_on = settings.fallback_to
            return None
        record.compile_seconds += built.seconds
        record.from_cache = built.from_cache
        record.execution_devices = built.execution_devices
        if settings.tracker.cache.get("enabled"):
            settings.tracker.cache["hits" if built.from_cache else "misses"] += 1
        if precision := effective_precision(built.compiled):
            settings.tracker.config["effective_precision"] = precision
        logger.info(
            "Compiled %s: %d ops, convert %.2f s, compile %.2f s", part.name, part.ops, converted.seconds, built.seconds
        )
        return CompiledPartition(built.compiled, converted, settings.own_weights)

    def _name(self, part_name: str) -> str:
        return f"graph {self._record.index} / {part_name}"

    def _part_failed(self, kind: Any, part: Part, error: Exception) -> None:
        settings = self._settings
        name = self._name(part.name)
        settings.tracker.add_fallback(kind, name, to=settings.fallback_to, reason=str(error))
        logger.warning("Fallback: %s runs on %s (%s): %s", name, settings.fallback_to, kind, error)

    def _runtime_failed(self, part_name: str, error: Exception) -> None:
        name = self._name(part_name)
        by_request = isinstance(error, IntegerRangeError)
        if self._settings.tracker.add_fallback(
            "runtime_failed", name, to="eager", reason=str(error), caused_by_request=by_request
        ):
            logger.warning("Fallback: a call of %s ran in eager PyTorch: %s", name, error)


def _holds(variant: Variant, weights: tuple[Any, ...]) -> bool:
    watch = variant.watch
    return watch is None or (watch.same_objects(weights) and watch.unchanged(weights))
