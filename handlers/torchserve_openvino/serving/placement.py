"""Stores which partitions and calls eager PyTorch runs because it is faster, so that it is measured once.

All workers of a model on a machine, and their restarts, then run the same, and a warm start measures nothing. Another
CPU, another number of threads, or another version measures again.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from torchserve_openvino.backend import CompiledModule
from torchserve_openvino.backend.runtime.build import device_capabilities, device_facts
from torchserve_openvino.backend.torchscript.python_form import identifiable
from torchserve_openvino.cache.identity.fingerprint import fingerprint
from torchserve_openvino.cache.identity.key import make_key
from torchserve_openvino.cache.identity.versions import versions
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.config import ResolvedOptions
from torchserve_openvino.config.cores import allowed_cores
from torchserve_openvino.config.openvino.precisions import instruction_set
from torchserve_openvino.passes.digests import all_passes

logger = logging.getLogger(__name__)

_KIND = "placement"
# They change no time.
_IDLE_PROPERTIES = frozenset({"CACHE_DIR", "LOG_LEVEL"})


class SlowerThere(BaseModel):
    """A partition or a call that takes longer on OpenVINO than in eager PyTorch.

    Attributes:
        name: The partition's name in the report, or that of the case.
        cases: Names of the cases that were timed, for the report.
        openvino: Seconds of the fastest call on OpenVINO.
        eager: The same in eager PyTorch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    cases: str
    openvino: float = Field(gt=0, allow_inf_nan=False)
    eager: float = Field(gt=0, allow_inf_nan=False)


class Placement(BaseModel):
    """What was decided for a model.

    Attributes:
        partitions: Partitions that are slower on OpenVINO.
        calls: Calls that are, as a whole.
        unused: Names of partitions that no call uses any more.
        untimed: What there was no time for, for the report.
    """

    model_config = ConfigDict(extra="forbid")

    partitions: list[SlowerThere] = []
    calls: list[SlowerThere] = []
    unused: list[str] = []
    untimed: list[str] = []


class Placements:
    """The stored placements of one model.

    Args:
        store: The model's cache, which an archive may include; None to store nothing.
        model: The eager model.
        compiled: The same, compiled and run in all cases.
        resolved: The backend's options.
        cases: Names of the cases.
        may_leave: Whether the fallback policy lets partitions run in eager PyTorch.
    """

    def __init__(
        self, store: Store | None, model: Any, compiled: CompiledModule, resolved: ResolvedOptions,
        cases: Sequence[str], may_leave: bool,
    ) -> None:  # fmt: skip
        identity = fingerprint(identifiable(model)) if store is not None else None
        self._store = None if identity is None or identity.unknown else store
        if self._store is None or identity is None:
            return
        device = resolved.options.device
        facts = device_facts(device)
        partitions = sorted((each.name, each.record.op_counts) for each in compiled.running.values())
        self._fields: dict[str, Any] = {
            **versions(),
            "code": identity.code,
            "weights": identity.weights,
            "partitions": [[name, dict(sorted(counts.items()))] for name, counts in partitions],
            "cases": list(cases),
            "may_leave": may_leave,
            "device": device,
            "device_name": facts["names"],
            "capabilities": {
                "fast": sorted(device_capabilities(device)) if device == "CPU" else facts["fast"],
                "cpu": facts["cpu"],
                "limit": facts["limit"],
                "instructions": instruction_set() if device == "CPU" else "",
            },
            "ov_config": {
                name: str(value) for name, value in resolved.options.config.items() if name not in _IDLE_PROPERTIES
            },
            "torch_threads": torch.get_num_threads(),
            "cores": allowed_cores(),
            "passes": all_passes(),
        }
        self._key = make_key(_KIND, self._fields)

    def lock(self) -> AbstractContextManager[bool]:
        """Returns the lock that a worker holds while it measures; the others wait, then use its placement."""
        return self._store.lock(_KIND, self._key) if self._store is not None else nullcontext(True)

    def load(self) -> Placement | None:
        """Returns the stored placement; None if there is none, or it is damaged."""
        entry = self._store.get(_KIND, self._key) if self._store is not None else None
        if entry is None:
            return None
        try:
            return Placement.model_validate(dict(entry.body))
        except ValidationError as error:
            logger.warning("A stored placement cannot be used and is measured again: %s", error)
            return None

    def save(self, placement: Placement) -> None:
        """Stores a placement, where something is writable."""
        if self._store is not None and self._store.writable:
            self._store.put(_KIND, self._key, fields=self._fields, body=placement.model_dump())
