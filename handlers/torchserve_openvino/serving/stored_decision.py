"""Stores what was measured for a model on this machine: its workers and restarts decide alike, and measure once."""

import logging
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from torchserve_openvino.backend.runtime.build import device_capabilities, device_facts
from torchserve_openvino.cache.identity.fingerprint import Fingerprint
from torchserve_openvino.cache.identity.key import graph_options, make_key
from torchserve_openvino.cache.identity.versions import versions
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.config import ResolvedOptions
from torchserve_openvino.config.openvino.precisions import instruction_set
from torchserve_openvino.config.options import json_safe
from torchserve_openvino.passes.digests import all_passes
from torchserve_openvino.serving.shapes.warmup import Case

logger = logging.getLogger(__name__)

Decided = TypeVar("Decided", bound=BaseModel)


class StoredDecision(Generic[Decided]):
    """A decision about one model. Another CPU, another version, other weights or options decide again.

    Args:
        kind: The kind of entry in the cache.
        schema: What is stored; anything else in the cache is not used.
        store: The model's cache, which an archive may include.
        model: The fingerprint of the eager model.
        resolved: The backend's options.
        arguments: How the model is captured and converted, and which sizes its graphs leave open, JSON-safe.
        cases: The calls that are compiled.
        without: OpenVINO's properties that the decision does not depend on.
        fields: What else it depends on, JSON-safe.
        behind: Another store, which is only read.
    """

    def __init__(
        self, kind: str, schema: type[Decided], store: Store, model: Fingerprint, resolved: ResolvedOptions,
        arguments: Mapping[str, Any], cases: Sequence[Case], without: Set[str], fields: Mapping[str, Any],
        behind: Store | None = None,
    ) -> None:  # fmt: skip
        self._kind, self._schema, self._store, self._behind = kind, schema, store, behind
        device = resolved.options.device
        facts = device_facts(device)
        is_cpu = device == "CPU"
        config = resolved.options.ov_config()
        self._fields: dict[str, Any] = {
            **versions(),
            "code": model.code,
            "weights": model.weights,
            "device": device,
            "device_name": facts["names"],
            "capabilities": {
                **{name: value for name, value in facts.items() if name != "names"},
                "fast": sorted(device_capabilities(device)) if is_cpu else facts["fast"],
                # A virtual machine may hide AMX.
                "instructions": instruction_set() if is_cpu else "",
            },
            "ov_config": {name: str(value) for name, value in config.items() if name not in without},
            "options": graph_options(json_safe(resolved.values())),
            "arguments": dict(arguments),
            "passes": all_passes(),
            "cases": [case.to_plain() for case in cases],
            **fields,
        }
        self._key = make_key(kind, self._fields)

    def lock(self) -> AbstractContextManager[bool]:
        """Returns the lock that a worker holds while it measures; the others wait, then use its decision."""
        return self._store.lock(self._kind, self._key)

    def load(self) -> tuple[Decided, str] | None:
        """Returns the decision and when it was made; None if there is none, or it is damaged."""
        entry = self._store.get(self._kind, self._key)
        if entry is None and self._behind is not None:
            entry = self._behind.get(self._kind, self._key)
        if entry is None:
            return None
        try:
            return self._schema.model_validate(dict(entry.body)), entry.created
        except ValidationError as error:
            logger.warning("A stored %s cannot be used and is measured again: %s", self._kind, error)
            return None

    def save(self, decision: Mapping[str, Any]) -> bool:
        """Stores a decision; returns False if nothing is writable, so that other workers will not find it."""
        if not self._store.writable:
            return False
        return self._store.put(self._kind, self._key, fields=self._fields, body=dict(decision)) is not None
