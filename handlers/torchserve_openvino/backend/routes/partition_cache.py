"""Caches partitions: as OpenVINO IR with their interface, and as blobs compiled for a device.

Light to import, because a worker that starts warm loads its partitions through this module only.
"""

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openvino as ov

from torchserve_openvino.backend.routes.artifacts import ArtifactStore
from torchserve_openvino.backend.routes.serialized_graph import PlainGraphError, mapped_modules, serialized_part
from torchserve_openvino.backend.runtime.build import (
    Built,
    build_from_ir,
    cpu_level,
    device_facts,
    export_blob,
    import_blob,
    note_built,
)
from torchserve_openvino.backend.runtime.crashes.journal import Journal
from torchserve_openvino.backend.runtime.execute import CompiledPartition
from torchserve_openvino.backend.runtime.output_memory import OutputMemory
from torchserve_openvino.backend.spec import Interface
from torchserve_openvino.cache.identity.key import RUN_PROPERTIES, digest, make_key
from torchserve_openvino.cache.identity.versions import versions
from torchserve_openvino.cache.identity.weights_digest import tensor_digest
from torchserve_openvino.errors import CompileDiedError, DamagedEntryError, first_line
from torchserve_openvino.passes.digests import all_passes, device_passes, graph_passes
from torchserve_openvino.report.records import CacheRecord, PartitionRecord
from torchserve_openvino.report.tracker import Tracker

if TYPE_CHECKING:
    import torch

    from torchserve_openvino.backend.conversion.convert import Converted
    from torchserve_openvino.backend.partitioning.partition import Subgraph

logger = logging.getLogger(__name__)

# Replaces the device names in a blob's fields if the blob is for any CPU with a given instruction set.
LEVEL = "level"


@dataclass(frozen=True)
class StoredPartition:
    """A partition from the cache, compiled."""

    interface: Interface
    built: Built

    def run(self, record: PartitionRecord, tracker: Tracker, memory: OutputMemory) -> CompiledPartition:
        """Returns the partition ready to be called, and fills in its record."""
        note_built(self.built, self.interface, record, tracker)
        return CompiledPartition(self.built.compiled, self.interface, self.built.keep_alive, memory)


class PartitionCache:
    """Loads and stores partitions for one device and configuration.

    Args:
        store: Holds the entries.
        device: OpenVINO device string.
        ov_config: Properties for OpenVINO.
        record: Counts hits, misses and other events.
        for_level: Whether blobs are stored for any CPU with this instruction set, not only for this CPU.
        mappings: Digest of the user's mappings; empty if there are none.
        converter: How partitions become IR; see `BackendSettings`.
        journal: Remembers what is compiled, in case that the process dies.

    Attributes:
        mappings: The digest of the user's mappings.
        mapped: Files that compiled models were read from, and that are still mapped into memory.
    """

    def __init__(
        self,
        store: ArtifactStore,
        device: str,
        ov_config: Mapping[str, Any],
        record: CacheRecord,
        for_level: bool = False,
        mappings: str = "",
        converter: str = "fx",
        journal: Journal | None = None,
    ) -> None:
        self.store = store
        self._journal = journal
        self._converter = converter
        self._device = device
        self._config = {name: value for name, value in ov_config.items() if name != "CACHE_DIR"}
        self._record = record
        self._for_level = for_level
        self.mappings = mappings
        self.mapped: set[Path] = set()

    def fields(self, part: "Subgraph", constants: Mapping[int, "torch.Tensor"]) -> dict[str, Any] | None:
        """Returns the fields of a partition's key; None if the graph has no plain form."""
        try:
            graph = serialized_part(part)
            mappings = [self.mappings, mapped_modules(part)] if self.mappings else []
        except (PlainGraphError, TypeError) as error:
            self._record.refused[f"a partition was not stored: {error}"] += 1
            return None
        contents = {str(position): tensor_digest(tensor) for position, tensor in constants.items()}
        return {
            **versions(),
            "graph": digest(graph),
            "constants": digest(contents),
            "mappings": digest(mappings) if mappings else "",
            "converter": self._converter,
            "passes": graph_passes(),
        }

    def lock(self, keys: list[str]) -> AbstractContextManager[bool]:
        """Locks keys while their partitions are made, so that other processes wait instead of compiling them too."""
        return self.store.lock("partition", digest(sorted(keys))) if keys else nullcontext(True)

    # --- loading ----------------------------------------------------------------------------------------------

    def load(self, key: str, name: str = "") -> StoredPartition | None:
        """Loads a partition from its blob, or from its IR if this device has no blob; returns None if not stored.

        Args:
            key: Key of the partition.
            name: Where the report shows it.
        """
        entry = self.store.get("partition", key)
        if entry is None:
            self._record.misses += 1
            return None
        # Imported here: it imports pydantic, which is needed only where there are entries.
        from torchserve_openvino.backend.routes.call_entry import read_interface

        try:
            interface = read_interface(entry.body)
            built = self._from_blob(key)
            if built is None:
                weights = entry.path("model.bin")
                built = build_from_ir(
                    entry.read("model.xml"), weights, self._device, self._config, self._journal, name or key[:12]
                )
                self.mapped.add(weights.resolve())
                self._record.compiles += 1
                self._store_blob(key, built)
        except CompileDiedError as error:
            # The entry is right. Whoever converts the partition instead gets the same error, and counts the fallback.
            self._record.refused[f"a stored partition was not used: {first_line(error)[:200]}"] += 1
            self._record.misses += 1
            return None
        except (DamagedEntryError, LookupError, TypeError, ValueError, OSError, RuntimeError) as error:
            logger.warning("A partition in the cache cannot be used and is rebuilt: %s", error)
            self._record.refused[f"a stored partition was not used: {first_line(error)[:200]}"] += 1
            self.store.discard("partition", key)
            self._record.misses += 1
            return None
        self._record.hits += 1
        return StoredPartition(interface, built)

    def _from_blob(self, key: str) -> Built | None:
        for fields in self._blob_fields(key):
            blob_key = make_key("blob", fields)
            entry = self.store.get("blob", blob_key)
            if entry is None:
                continue
            try:
                note = str(entry.body.get("note", ""))[:1000]
                products = _numbers(entry.body.get("products"))
                path = entry.path("blob")
                built = import_blob(path, self._device, self._config, self._journal, note, products)
            except (DamagedEntryError, OSError, RuntimeError) as error:
                # OpenVINO itself checks its version and the instruction set.
                logger.warning(
                    "A compiled model in the cache is not used; compiling its IR: %s", first_line(error)[:200]
                )
                self._record.refused[f"a blob was not used: {first_line(error)[:200]}"] += 1
                self.store.discard("blob", blob_key)
                continue
            self._record.imports += 1
            self.mapped.add(path.resolve())
            return built
        return None

    def _blob_fields(self, key: str) -> Iterator[dict[str, Any]]:
        yield self._fields_of_blob(key, device_facts(self._device))
        if self._device == "CPU":
            yield self._fields_of_blob(key, {LEVEL: cpu_level()})

    def _fields_of_blob(self, key: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        config = {name: str(value) for name, value in self._config.items() if name not in RUN_PROPERTIES}
        return {
            **versions(),
            "partition": key,
            "device": self._device,
            **_hardware(facts),
            "ov_config": config,
            # Importing a blob compiles it anew, with as many threads as there are then: a pass depends on them.
            "passes": device_passes(self._config),
        }

    # --- storing ----------------------------------------------------------------------------------------------

    def save(self, key: str, fields: Mapping[str, Any], converted: "Converted", built: Built) -> None:
        """Stores a partition that was just made; a failure is counted and otherwise ignored."""
        with tempfile.TemporaryDirectory(prefix="torchserve-openvino-") as folder:
            path = Path(folder) / "model.xml"
            try:
                ov.save_model(converted.model, path, compress_to_fp16=False)
            except (RuntimeError, OSError) as error:
                logger.warning("A partition could not be written for the cache: %s", error)
                self._record.refused[f"a partition was not stored: {first_line(error)[:200]}"] += 1
                return
            files: dict[str, Any] = {"model.xml": path, "model.bin": path.with_suffix(".bin")}
            body = {"interface": converted.interface.to_plain()}
            if self.store.put("partition", key, fields=fields, body=body, files=files) is not None:
                self._record.stored += 1
        self._store_blob(key, built)

    def _store_blob(self, key: str, built: Built) -> None:
        blob = export_blob(built.compiled)
        if blob is None:
            self._record.refused[f"{self._device} does not export compiled models; their IR is stored"] += 1
            return
        facts = {LEVEL: cpu_level()} if self._for_level else device_facts(self._device)
        fields = self._fields_of_blob(key, facts)
        body: dict[str, Any] = {"note": built.note} if built.note else {}
        if built.products:
            body["products"] = built.products
        if self.store.put("blob", make_key("blob", fields), fields=fields, body=body, files={"blob": blob}) is not None:
            self._record.stored += 1


def _numbers(value: Any) -> dict[str, int]:
    """Returns the numbers in a mapping that was stored; nothing where it holds anything else."""
    pairs = value.items() if isinstance(value, Mapping) else ()
    return {str(name): number for name, number in pairs if isinstance(number, int)}


def fits_here(fields: Mapping[str, Any]) -> bool:
    """Checks whether a blob with these fields is for this machine's device, whatever its configuration."""
    device = str(fields.get("device", ""))
    if not set(fields.get("passes", ())) <= set(all_passes()):
        return False
    if LEVEL in fields.get("capabilities", {}):
        facts: Mapping[str, Any] = {LEVEL: cpu_level()} if device == "CPU" else {}
    else:
        try:
            facts = device_facts(device)
        except RuntimeError:
            # A device that this machine lacks.
            return False
    return all(fields.get(name) == value for name, value in _hardware(facts).items())


def _hardware(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a blob that identify its hardware."""
    return {
        "device_name": facts.get("names", LEVEL),
        "capabilities": {name: value for name, value in facts.items() if name != "names"},
    }
