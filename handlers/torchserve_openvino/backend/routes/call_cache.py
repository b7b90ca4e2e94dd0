"""Caches calls: with an entry, one input signature of one model runs without tracing.

An entry names the partitions, holds the graph around them and the partitions' own graphs (for fallbacks to eager) as
plain data, and states where each input of the graph comes from: the caller, a weight by its name, or a stored value.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

from torchserve_openvino.backend.backend_settings import BackendSettings, RunningPartition
from torchserve_openvino.backend.routes.artifacts import Artifact
from torchserve_openvino.backend.routes.frozen import Key, Route, signature
from torchserve_openvino.backend.routes.partition_cache import PartitionCache
from torchserve_openvino.backend.routes.serialized_graph import (
    LazyGraph,
    PlainGraph,
    attributes,
    below,
    decode,
    draws_random_numbers,
    encode,
    plain_fallback,
    plain_record,
    plain_single,
    text_to_tree,
    to_plain,
    tree_to_text,
)
from torchserve_openvino.backend.runtime.assemble import SinglePartition
from torchserve_openvino.backend.runtime.execute import FallbackPartition, count_runtime_failure
from torchserve_openvino.cache.identity.fingerprint import Fingerprint, fingerprint
from torchserve_openvino.cache.identity.key import digest, graph_options
from torchserve_openvino.cache.identity.torch_state import torch_state
from torchserve_openvino.cache.identity.versions import python_version, versions
from torchserve_openvino.cache.identity.weights_digest import named_weights, tensor_digest
from torchserve_openvino.config.options import json_safe
from torchserve_openvino.passes.digests import graph_passes
from torchserve_openvino.report.records import GraphRecord

if TYPE_CHECKING:
    from torchserve_openvino.backend.routes.call_entry import StoredCall
    from torchserve_openvino.backend.routes.serialized_graph import Blueprint

logger = logging.getLogger(__name__)

_TENSORS = "tensors.safetensors"


class CallCache:
    """Loads and stores the calls of one frozen model.

    Args:
        model: The model; its weights and code must not change until `describe_anew`.
        settings: Settings of the model, with a cache.
        shapes: The arguments that decide for which sizes a graph is made, JSON-safe.
    """

    def __init__(self, model: Any, settings: BackendSettings, shapes: Mapping[str, Any]) -> None:
        assert settings.partitions is not None
        self._model = model
        self._settings = settings
        self._partitions: PartitionCache = settings.partitions
        self._store = settings.partitions.store
        self._record = settings.tracker.cache
        self._shapes = shapes
        self._print: Fingerprint | None = None
        self._runs: dict[str, _Built] = {}
        # Maps the key of each entry that was used to the identity of its graph.
        self._used: dict[str, str] = {}
        # Ids of the records of graphs whose result was used.
        self._accepted: set[int] = set()

    def describe_anew(self) -> None:
        """Makes the next call compute the model's fingerprint again."""
        self._print = None

    def fields(self, key: Key) -> dict[str, Any] | None:
        """Returns what the entry of a signature depends on; None if the model or the signature can't be described."""
        if self._print is None:
            self._print = fingerprint(self._model)
            for what in self._print.unknown:
                reason = f"{what} can't be made part of the key, so the model is traced in each process"
                self._record.refused[reason] += 1
                logger.info("Cache: %s", reason)
        if self._print.unknown:
            return None
        try:
            form = signature(key)
        except ValueError as error:
            self._record.refused[str(error)] += 1
            return None
        return {
            **versions(),
            "python": python_version(),
            "code": self._print.code,
            "weights": self._print.weights,
            "signature": form,
            "options": graph_options(json_safe(self._settings.resolved.values())),
            "arguments": {**self._shapes, "backend": self._settings.backend},
            "mappings": self._partitions.mappings,
            "passes": graph_passes(),
            "torch_state": torch_state(),
        }

    def lock(self, key: str) -> AbstractContextManager[bool]:
        """Locks a signature while it is traced, so that other processes wait instead of tracing it too."""
        return self._store.lock("call", key)

    # --- loading ----------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Checks whether a signature is stored, by this or another process."""
        return self._store.get("call", key) is not None

    def load(self, key: str, fields: Mapping[str, Any]) -> Route | None:
        """Returns the route of a signature; None if it is not stored or can't be used."""
        entry = self._store.get("call", key)
        if entry is None:
            self._record.call_misses += 1
            if self._record.nearest is None:
                self._record.nearest = self._store.nearest("call", fields)
            return None
        # Imported here: it imports pydantic, which is needed only where there are entries.
        from torchserve_openvino.backend.routes.call_entry import read_call

        try:
            body = read_call(entry.body)
            route = self._route(entry, body)
        except Exception as error:
            # torch, OpenVINO and safetensors may raise anything for a damaged or foreign entry; it counts as a miss.
            reason = " ".join(str(error).split())[:200]
            logger.warning("A call in the cache cannot be used and is traced again: %s", reason)
            self._record.refused[f"a stored call was not used: {reason}"] += 1
            self._store.discard("call", key)
            route = None
        if route is None:
            self._record.call_misses += 1
            return None
        self._record.call_hits += 1
        self._used[key] = body.identity
        return route

    def accept(self, key: str) -> None:
        """Adds the graph of an entry to the report, because its result is used."""
        tracker = self._settings.tracker
        built = self._runs[self._used[key]]
        if id(built.record) in self._accepted:
            return
        self._accepted.add(id(built.record))
        tracker.add_graph(built.record)
        for item in built.left_out:
            tracker.add_fallback(**item)

    def reject(self, key: str) -> None:
        """Discards an entry whose result was wrong, and its partitions."""
        self.discard(key)
        built = self._runs.pop(self._used.pop(key, ""), None)
        for part in built.keys if built is not None else ():
            self._store.discard("partition", part)
        self._record.rejected += 1
        self._record.call_hits -= 1

    def discard(self, key: str) -> None:
        """Discards an entry, but not its partitions, because the call turned out not to be repeatable."""
        self._store.discard("call", key)

    def reject_used(self) -> bool:
        """Rejects every entry that was used; returns whether there was one."""
        used = list(self._used)
        for key in used:
            self.reject(key)
        return bool(used)

    def _route(self, entry: Artifact, body: "StoredCall") -> Route | None:
        tensors = safetensors.torch.load(entry.read(_TENSORS)) if _TENSORS in entry.files else {}
        run = self._run(body, tensors)
        if run is None:
            return None
        weights = dict(named_weights(self._model)) if isinstance(self._model, torch.nn.Module) else {}
        template: list[Any] = []
        places: list[tuple[int, int]] = []
        kind: str
        value: Any
        for position, (kind, value) in enumerate(body.inputs):
            if kind == "leaf":
                places.append((position, value))
            sources = {"weight": weights, "tensor": tensors}
            template.append(sources[kind][value] if kind in sources else decode(value) if kind == "literal" else None)
        out = [(bool(is_result), value if is_result else decode(value)) for is_result, value in body.out]
        return Route(run, template, places, out, text_to_tree(body.out_spec) if body.out_spec else None)

    def _run(self, body: "StoredCall", tensors: Mapping[str, torch.Tensor]) -> Callable[..., Any] | None:
        """Returns the graph as a function, one for all signatures that share it; None if a partition is missing."""
        identity = body.identity
        if identity not in self._runs:
            built = self._build(body, tensors)
            if built is None:
                return None
            self._runs[identity] = built
        return self._runs[identity].run

    def _build(self, body: "StoredCall", tensors: Mapping[str, torch.Tensor]) -> "_Built | None":
        tracker, copy = self._settings.tracker, self._settings.eager_copy
        compiles = self._record.compiles
        stored = [self._partitions.load(part.key, part.name) for part in body.parts]
        parts = [part for part in stored if part is not None]
        if len(parts) < len(stored):
            return None
        record = body.record.to_record()
        calls: dict[str, FallbackPartition] = {}
        for part, loaded, partition in zip(body.parts, parts, record.partitions, strict=True):
            fallback = LazyGraph(part.graph.model_dump(), below(tensors, part.name))
            calls[part.name] = FallbackPartition(
                loaded.run(partition, tracker, self._settings.memory),
                functools.partial(copy.run, fallback),
                functools.partial(count_runtime_failure, tracker, f"graph {record.index} / {part.name}", record.line),
                part.returns_tuple,
            )
            self._settings.running[calls[part.name]] = RunningPartition(record, partition)
        whole = body.whole
        if whole is not None:
            slots = [(kind, decode(value)) for kind, value in whole.slots]
            run: Callable[..., Any] = SinglePartition(whole.part, whole.pick, slots).bind(calls[whole.part])
        else:
            assert body.outer is not None
            run = PlainGraph(body.outer.model_dump(), calls, below(tensors, "outer"))
        if self._record.compiles != compiles:
            # Not all of it was stored for this device.
            tracker.add_build()
        if tracker.notes_runs:
            run = self._noted(run, record)
        keys = tuple(part.key for part in body.parts)
        return _Built(run, record, [item.model_dump() for item in body.left_out], keys)

    def _noted(self, run: Callable[..., Any], record: GraphRecord) -> Callable[..., Any]:
        """Returns the graph as a function that notes its calls for the fallback policy, once a result was used."""
        accepted, ran = self._accepted, self._settings.tracker.ran

        def noted(*args: Any) -> Any:
            if id(record) in accepted:
                ran.add(record.index)
            return run(*args)

        return noted

    # --- storing ----------------------------------------------------------------------------------------------

    def save(self, key: str, fields: Mapping[str, Any], route: Route, blueprint: "Blueprint") -> None:
        """Stores the route of a call; a call that can't be stored is counted with the reason."""
        now = fingerprint(self._model)
        if (now.code, now.weights) != (fields["code"], fields["weights"]):
            self._record.refused["a call was not stored: the model changed while it ran, so it keeps state"] += 1
            return
        try:
            body, tensors = self._body(route, blueprint)
            files = {_TENSORS: safetensors.torch.save(tensors)} if tensors else {}
            stored = self._store.put("call", key, fields=fields, body=body, files=files)
        except (TypeError, ValueError) as error:
            self._record.refused[f"a call was not stored: {error}"] += 1
            logger.info("Cache: a call is not stored: %s", error)
            return
        self._record.stored += stored is not None

    def _body(self, route: Route, blueprint: "Blueprint") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        for item in blueprint.left_out:
            if draws_random_numbers(item.op):
                raise ValueError(f"{item.op} draws random numbers: no result of the model can be verified")
        partitioned = blueprint.partitioned
        tensors: dict[str, torch.Tensor] = {}
        parts = []
        for part, key in zip(partitioned.parts, blueprint.keys, strict=True):
            graph = to_plain(part.graph.graph)
            parts.append({"name": part.name, "key": key, "graph": graph, "returns_tuple": part.returns_tuple})
            tensors |= {f"{part.name}/{name}": tensor for name, tensor in attributes(part.graph).items()}
        tensors |= {f"outer/{name}": tensor for name, tensor in attributes(partitioned.outer).items()}
        whole = SinglePartition.of(partitioned.outer)
        graph = {
            "parts": parts,
            "whole": None if whole is None else plain_single(whole),
            "outer": None if whole is not None else to_plain(partitioned.outer.graph),
        }
        contents = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        body = {
            **graph,
            "identity": digest([graph, contents]),
            "record": plain_record(blueprint.record),
            "left_out": [plain_fallback(item) for item in blueprint.left_out],
            "inputs": self._inputs(route, tensors),
            "out": [[is_result, value if is_result else encode(value)] for is_result, value in route.out],
            "out_spec": tree_to_text(route.out_spec) if route.out_spec is not None else "",
        }
        return body, {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}

    def _inputs(self, route: Route, tensors: dict[str, torch.Tensor]) -> list[list[Any]]:
        """Returns where each input of the graph comes from; adds tensors from elsewhere to ``tensors``."""
        weights = named_weights(self._model) if isinstance(self._model, torch.nn.Module) else ()
        names = {id(tensor): name for name, tensor in weights}
        leaves = dict(route.places)
        answers: list[list[Any]] = []
        for position, value in enumerate(route.template):
            if position in leaves:
                answers.append(["leaf", leaves[position]])
            elif isinstance(value, torch.Tensor) and id(value) in names:
                answers.append(["weight", names[id(value)]])
            elif type(value) is torch.Tensor:
                name = f"input/{position}"
                tensors[name] = value
                answers.append(["tensor", name])
            else:
                answers.append(["literal", encode(value)])
        return answers


@dataclasses.dataclass(frozen=True, eq=False)
class _Built:
    """A graph from the cache; its record joins the report once one of its results is accepted."""

    run: Callable[..., Any]
    record: GraphRecord
    left_out: list[dict[str, Any]]
    keys: tuple[str, ...]
