"""Stores which partitions and calls eager PyTorch runs because it is faster, so that it is measured once.

All workers of a model on a machine, and their restarts, then run the same, and a warm start measures nothing. Another
CPU, another number of threads, or another version measures again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from torchserve_openvino.backend import CompiledModule
from torchserve_openvino.cache.identity.fingerprint import Fingerprint
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.config import ResolvedOptions
from torchserve_openvino.config.cores import allowed_cores
from torchserve_openvino.serving.shapes.warmup import Case
from torchserve_openvino.serving.stored_decision import StoredDecision

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


def stored_placement(
    store: Store, model: Fingerprint, compiled: CompiledModule, resolved: ResolvedOptions,
    arguments: Mapping[str, Any], cases: Sequence[Case], may_leave: bool,
) -> StoredDecision[Placement]:  # fmt: skip
    """Opens the stored placement of a model.

    Args:
        store: The model's cache.
        model: The fingerprint of the eager model, which describes all of it.
        compiled: The model, compiled and run in all cases.
        resolved: The backend's options.
        arguments: See `StoredDecision`.
        cases: The calls that were run.
        may_leave: Whether the fallback policy lets partitions run in eager PyTorch.
    """
    partitions = sorted((partition.name, partition.record.op_counts) for partition in compiled.running.values())
    fields = {
        "partitions": [[name, dict(sorted(counts.items()))] for name, counts in partitions],
        "may_leave": may_leave,
        "torch_threads": torch.get_num_threads(),
        "cores": allowed_cores(),
    }
    return StoredDecision("placement", Placement, store, model, resolved, arguments, cases, _IDLE_PROPERTIES, fields)
