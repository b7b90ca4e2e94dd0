"""Builds compiled partitions from a lowered graph and a set of weights, through the cache if there is one.

Runs the stages (partitioning, conversion, build) in turn, starts over without an operator that turns out not to
convert, and records the results.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchserve_openvino.backend.backend_settings import BackendSettings, RunningPartition
from torchserve_openvino.backend.conversion.convert import ConversionError, Converted, convert
from torchserve_openvino.backend.instrumentation import Observation
from torchserve_openvino.backend.partitioning.partition import (
    Partitioned,
    RefusedNode,
    Subgraph,
    float_layers,
    partition,
)
from torchserve_openvino.backend.partitioning.views import is_view
from torchserve_openvino.backend.routes.partition_cache import StoredPartition
from torchserve_openvino.backend.routes.serialized_graph import Blueprint
from torchserve_openvino.backend.runtime.assemble import assemble
from torchserve_openvino.backend.runtime.build import Built, build, compile_as_is, note_built
from torchserve_openvino.backend.runtime.execute import (
    CompiledPartition,
    FallbackPartition,
    as_traced,
    count_runtime_failure,
)
from torchserve_openvino.backend.spec import ValueSpec, spec_of
from torchserve_openvino.cache.identity.key import make_key
from torchserve_openvino.errors import CompileDiedError
from torchserve_openvino.ops import Unsupported, op_name
from torchserve_openvino.ops.names import value_of
from torchserve_openvino.passes.fx.weight_integers import CLOSED, REFUSED
from torchserve_openvino.report.records import GraphRecord, PartitionRecord

# --- runs a subgraph that OpenVINO could not compile: in eager PyTorch, or with Inductor if the user chose it -----


def fallback_for(part: Subgraph, settings: BackendSettings) -> Callable[..., Any]:
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

    def __init__(self, part: Subgraph, settings: BackendSettings) -> None:
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
            self._settings.tracker.add_fallback(
                "compile_failed", self._part.name, reason=f"inductor: {error}", where=self._part.where
            )
            logger.warning("Fallback: inductor failed for %s, eager is used: %s", self._part.name, error)
            self._run = laid_out(self._part.graph)
            result = self._run(*args)
        self._proven = True
        return result


# --- builds compiled partitions from a lowered graph and a set of weights, through the cache if there is one ------


logger = logging.getLogger(__name__)

Constants = dict[int, torch.Tensor]


@dataclass
class Assembled:
    """A graph with compiled partitions.

    Attributes:
        run: Maps all inputs, weights included, to a sequence of outputs.
        blueprint: How to build it again from the cache; None if a partition is not in the cache.
    """

    run: Callable[..., Any]
    blueprint: Blueprint | None


class GraphBuilder:
    """Builds one lowered graph, once for each set of weights.

    Args:
        gm: The lowered graph.
        settings: Settings of the model.
        record: The graph's record in the report.
    """

    def __init__(self, gm: GraphModule, settings: BackendSettings, record: GraphRecord) -> None:
        self._gm = gm
        self._settings = settings
        self._record = record
        self._refused: dict[str, Unsupported] = {}
        self._partitioned = self._partition()

    def build(self, weights: Mapping[int, torch.Tensor]) -> Assembled:
        """Converts and compiles every partition, or loads it from the cache, and assembles them with the outer graph.

        Args:
            weights: Maps an input position to the weight that becomes a constant.
        """
        while True:
            constants = {part.name: self._constants(part, weights) for part in self._partitioned.parts}
            fields = self._fields(constants)
            keys = {name: make_key("partition", key_fields) for name, key_fields in fields.items()}
            cache = self._settings.partitions
            with cache.lock(list(keys.values())) if cache is not None else nullcontext():
                stored = {name: cache.load(key) for name, key in keys.items()} if cache is not None else {}
                converted, refused = self._convert_missing(constants, stored)
                if not refused:
                    return self._finish(converted, stored, fields, keys)
            self._refused |= refused
            known = Counter(self._partitioned.left_out)
            self._partitioned = self._partition()
            self._report(Counter(self._partitioned.left_out) - known)

    def eagerly(self, error: Exception) -> Assembled:
        """Returns the whole graph in eager PyTorch, counted at each call, after an unexpected error in a stage."""
        settings, name, reason = self._settings, f"graph {self._record.index}", f"{type(error).__name__}: {error}"
        logger.warning("Fallback: %s runs in eager PyTorch (conversion_failed: %s)", name, reason, exc_info=error)
        for record in self._record.partitions:
            record.runs_on = "eager"

        eager = laid_out(self._gm)

        def run(*args: Any) -> Any:
            answer = settings.eager_copy.run(functools.partial(eager, *args))
            settings.tracker.add_fallback("conversion_failed", name, reason=reason, where=self._record.line)
            return answer

        return Assembled(run, None)

    def in_eager(self, *args: Any) -> Any:
        """Runs the lowered graph in eager PyTorch."""
        return laid_out(self._gm)(*args)

    def report_left_out(self) -> None:
        """Counts each node that stays in eager PyTorch, with its reason and the user's line."""
        self._report(Counter(self._partitioned.left_out))

    def _report(self, left_out: Counter[RefusedNode]) -> None:
        for item, count in left_out.items():
            new = self._settings.tracker.add_fallback(
                item.refusal.kind, item.op, reason=item.refusal.reason, where=item.where, count=count
            )
            if new:
                logger.warning(
                    "Fallback: %s runs in eager PyTorch (%s: %s) at %s",
                    item.op, item.refusal.kind, item.refusal.reason, item.where or "an unknown line",
                )  # fmt: skip

    # --- splitting --------------------------------------------------------------------------------------------

    def _refuse(self, node: Node) -> Unsupported | None:
        refusal = self._settings.support.refuse(node)
        if refusal is not None and refusal.kind == "unsupported_op" and CLOSED in node.meta:
            # Computed in torch, once.
            node.meta[REFUSED], refusal = refusal.reason, None
        refusal = self._refused.get(op_name(node.target)) or refusal
        leave_out = self._settings.instrumentation.leave_out
        if refusal is None and leave_out is not None and (reason := leave_out(node)) is not None:
            return Unsupported("disabled_op", reason)
        return refusal

    def _partition(self) -> Partitioned:
        partitioned = partition(self._gm, self._refuse, self._settings.resolved.options.min_partition_us)
        self._record.ops_total = partitioned.ops_total
        self._record.left_out = dict(Counter(item.op for item in partitioned.left_out))
        self._record.partitions = [
            PartitionRecord(part.name, part.ops, dict(part.op_counts), float_layers(part.graph.graph))
            for part in partitioned.parts
        ]
        return partitioned

    def _constants(self, part: Subgraph, weights: Mapping[int, torch.Tensor]) -> Constants:
        placeholders = {node.name: i for i, node in enumerate(self._gm.graph.find_nodes(op="placeholder"))}
        constants: Constants = {}
        for position, node in enumerate(part.arguments):
            if node.op == "get_attr":
                value = getattr(self._partitioned.outer, str(node.target))
                if isinstance(value, torch.Tensor):
                    constants[position] = value
            elif node.op == "placeholder" and placeholders[node.name] in weights:
                constants[position] = weights[placeholders[node.name]]
        return constants

    def _fields(self, constants: Mapping[str, Constants]) -> dict[str, dict[str, Any]]:
        cache = self._settings.partitions
        if cache is None:
            return {}
        by_part = {part.name: cache.fields(part, constants[part.name]) for part in self._partitioned.parts}
        return {name: fields for name, fields in by_part.items() if fields is not None}

    # --- converting and compiling -----------------------------------------------------------------------------

    def _convert_missing(
        self, constants: Mapping[str, Constants], stored: Mapping[str, StoredPartition | None]
    ) -> tuple[dict[str, Converted | None], dict[str, Unsupported]]:
        """Converts the parts that the cache does not have.

        Returns:
            The converted parts, None for each that failed; and the operators that made a conversion fail, which are to
            be left out.
        """
        result: dict[str, Converted | None] = {}
        refused: dict[str, Unsupported] = {}
        failed: list[tuple[Subgraph, ConversionError]] = []
        for part in self._partitioned.parts:
            if stored.get(part.name) is not None:
                continue
            try:
                compile = functools.partial(
                    compile_as_is, journal=self._settings.journal, name=f"constants of {self._name(part.name)}"
                )
                result[part.name] = convert(
                    part, constants[part.name], self._settings.mappings, self._settings.converter, compile
                )
            except ConversionError as error:
                result[part.name] = None
                fresh = error.ops - self._refused.keys()
                refused |= {op: Unsupported("conversion_failed", str(error)) for op in fresh}
                if not fresh:
                    failed.append((part, error))
        # Operators that are left out change the partitions, which are then converted again.
        if not refused:
            for part, problem in failed:
                died = isinstance(problem.__cause__, CompileDiedError)
                self._part_failed("compile_died" if died else "conversion_failed", part, problem)
        return result, refused

    def _finish(
        self,
        converted: Mapping[str, Converted | None],
        stored: Mapping[str, StoredPartition | None],
        fields: Mapping[str, dict[str, Any]],
        keys: Mapping[str, str],
    ) -> Assembled:
        settings = self._settings
        calls: dict[str, FallbackPartition] = {}
        for part, record in zip(self._partitioned.parts, self._record.partitions, strict=True):
            entry = stored.get(part.name)
            if entry is not None:
                compiled: CompiledPartition | None = entry.run(record, settings.tracker, settings.memory)
            else:
                fresh = converted[part.name]
                built = self._compile(part, fresh, record)
                compiled = self._run(built, fresh) if built is not None and fresh is not None else None
                if settings.partitions is not None and part.name in keys and built is not None and fresh is not None:
                    settings.partitions.save(keys[part.name], fields[part.name], fresh, built)
            fallback = part.graph.forward if compiled else fallback_for(part, settings)
            calls[part.name] = FallbackPartition(
                compiled,
                functools.partial(settings.eager_copy.run, fallback),
                functools.partial(count_runtime_failure, settings.tracker, self._name(part.name), self._line(part)),
                part.returns_tuple,
            )
            settings.running[calls[part.name]] = RunningPartition(self._record, record)
            record.builds += 1
        settings.tracker.add_build()
        run = settings.instrumentation.watch(
            Observation(self._gm, self._partitioned, calls, self._record), assemble(self._partitioned.outer, calls)
        )
        whole = all(call.compiled is not None for call in calls.values()) and len(keys) == len(calls)
        blueprint = None
        if settings.partitions is not None and whole:
            blueprint = Blueprint(self._partitioned, [keys[p.name] for p in self._partitioned.parts], self._record)
        return Assembled(run, blueprint)

    def _compile(self, part: Subgraph, converted: Converted | None, record: PartitionRecord) -> Built | None:
        settings = self._settings
        if converted is None:
            record.runs_on = settings.fallback_to
            return None
        record.convert_seconds += converted.seconds
        try:
            built = build(
                converted.model, settings.device, settings.ov_config, settings.own_weights, settings.journal,
                self._name(part.name),
            )  # fmt: skip
        except Exception as error:
            self._part_failed("compile_died" if isinstance(error, CompileDiedError) else "compile_failed", part, error)
            record.runs_on = settings.fallback_to
            return None
        settings.tracker.cache.compiles += not built.from_cache
        note_built(built, converted.interface, record, settings.tracker)
        logger.info(
            "Compiled %s: %d ops, convert %.2f s, compile %.2f s", part.name, part.ops, converted.seconds, built.seconds
        )
        return built

    def _run(self, built: Built, converted: Converted) -> CompiledPartition:
        keep_alive = None if self._settings.own_weights else converted.keep_alive
        return CompiledPartition(built.compiled, converted.interface, keep_alive, self._settings.memory)

    def _name(self, part_name: str) -> str:
        return f"graph {self._record.index} / {part_name}"

    def _line(self, part: Subgraph) -> str:
        return part.where or self._record.line

    def _part_failed(self, kind: Any, part: Subgraph, error: Exception) -> None:
        settings = self._settings
        name = self._name(part.name)
        settings.tracker.add_fallback(kind, name, to=settings.fallback_to, reason=str(error), where=self._line(part))
        logger.warning("Fallback: %s runs on %s (%s): %s", name, settings.fallback_to, kind, error)
