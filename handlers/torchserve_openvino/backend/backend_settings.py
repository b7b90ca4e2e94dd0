"""The settings of a compiled model, which are passed to every stage."""

import functools
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torchserve_openvino.backend.instrumentation import NOT_INSTRUMENTED, Instrumentation
from torchserve_openvino.backend.routes.frozen import CallRecorder
from torchserve_openvino.backend.routes.partition_cache import PartitionCache
from torchserve_openvino.backend.runtime.compare import FirstComparison
from torchserve_openvino.backend.runtime.crashes.journal import Journal
from torchserve_openvino.backend.runtime.execute import EagerCopy, FallbackPartition
from torchserve_openvino.backend.runtime.output_memory import OutputMemory
from torchserve_openvino.backend.upstream._openvino_private import frontend_converts, undecomposed, upstream_supported
from torchserve_openvino.config import ResolvedOptions
from torchserve_openvino.ops import SupportTable, decomposition_table, is_composite
from torchserve_openvino.ops.mappings import Mappings
from torchserve_openvino.report import Tracker
from torchserve_openvino.report.records import GraphRecord, PartitionRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunningPartition:
    """What the report has of a partition that is in use.

    Attributes:
        graph: The record of its graph.
        record: Its record.
    """

    graph: GraphRecord
    record: PartitionRecord

    @property
    def name(self) -> str:
        """Its name, unique within the report; the graph has its number once the report has the graph."""
        return f"graph {self.graph.index} / {self.record.name}"


@dataclass(frozen=True)
class BackendSettings:
    """Settings of one compiled model; no stage changes them.

    Attributes:
        resolved: The validated options.
        fallback_to: ``eager`` or ``inductor`` for a subgraph that OpenVINO can't compile.
        tracker: Collects the records of the report.
        recorder: Records what the model's calls do in each thread.
        own_weights: Whether compiled models keep their own copy of the weights, so that the module's can be freed.
        partitions: The cache of partitions; None without a cache.
        eager_copy: Runs fallbacks, unless PyTorch's weights were released.
        memory: Allocates the memory for results.
        mappings: Operators and modules that the user mapped.
        instrumentation: Hooks for a diagnosis.
        comparison: Compares new graphs with eager PyTorch, with the option ``verify``.
        journal: Remembers what is compiled, in case that the process dies; None to do without.
        backend: ``openvino``, ``openvino_ts`` or ``export``; decides how the model is captured and converted.
        running: The partitions that are in use, with their records.
    """

    resolved: ResolvedOptions
    tracker: Tracker
    fallback_to: str = "eager"
    recorder: CallRecorder = field(default_factory=CallRecorder)
    own_weights: bool = False
    partitions: PartitionCache | None = None
    eager_copy: EagerCopy = field(default_factory=EagerCopy)
    memory: OutputMemory = field(default_factory=OutputMemory)
    mappings: Mappings = field(default_factory=Mappings)
    instrumentation: Instrumentation = NOT_INSTRUMENTED
    journal: Journal | None = None
    backend: str = "openvino"
    running: "WeakKeyDictionary[FallbackPartition, RunningPartition]" = field(default_factory=WeakKeyDictionary)

    @functools.cached_property
    def comparison(self) -> FirstComparison:
        """See above."""
        return FirstComparison(self.tracker)

    @property
    def device(self) -> str:
        """The device string for OpenVINO."""
        return self.resolved.options.device

    @functools.cached_property
    def ov_config(self) -> Mapping[str, Any]:
        """Properties for ``compile_model``."""
        return self.resolved.options.ov_config()

    @property
    def converter(self) -> str:
        """How a partition becomes an ov.Model: ``fx``, or ``ts`` through TorchScript."""
        return converter_of(self.backend)

    # Needed only for tracing.

    @functools.cached_property
    def support(self) -> SupportTable:
        """Decides which nodes may run on OpenVINO."""
        disabled = self.resolved.options.disabled_ops
        # torch.export keeps composite operators whole.
        for name in disabled if self.backend != "export" else ():
            if is_composite(name):
                logger.warning(
                    "disabled_ops: %s has no effect: torch decomposes it before a backend sees it; "
                    "name the operators that it decomposes into",
                    name,
                )
        return _support(tuple(disabled), self.converter == "fx", self.mappings)

    @property
    def decompositions(self) -> dict[Any, Any]:
        """The decomposition table for AOTAutograd."""
        options = self.resolved.options
        if self.mappings:
            return decomposition_table(self.support, undecomposed(), options.decompositions)
        known = len(torch._C._dispatch_get_all_op_names()), len(torch._decomp.decomposition_table)
        return dict(
            _unmapped_table(tuple(options.disabled_ops), self.converter == "fx", tuple(options.decompositions), known)
        )


def _support(disabled: tuple[str, ...], own: bool, mappings: Mappings) -> SupportTable:
    libraries = mappings.libraries
    return SupportTable(
        upstream_supported(),
        disabled,
        converts=frontend_converts,
        own=own,
        # The user is responsible for operators that the user's own function or library converts.
        mapped=lambda name: (
            mappings.covers(name)
            or (bool(libraries) and frontend_converts(name, libraries) and not frontend_converts(name))
        ),
    )


@functools.lru_cache(maxsize=16)
def _unmapped_table(
    disabled: tuple[str, ...], own: bool, user: tuple[str, ...], known: tuple[int, int]
) -> dict[Any, Any]:
    """Builds the decomposition table without mappings, once for models of equal options: it takes 20 ms.

    Args:
        disabled: The option ``disabled_ops``.
        own: Whether this package's conversions are used.
        user: The option ``decompositions``.
        known: How many operators and decompositions torch knows; a library may register more.
    """
    return decomposition_table(_support(disabled, own, Mappings()), undecomposed(), user)


def converter_of(backend: str) -> str:
    """Returns which of OpenVINO's frontends a backend converts with, ``fx`` or ``ts``."""
    return "ts" if backend == "openvino_ts" else "fx"


def cpp_compiler() -> str | None:
    """Finds the C++ compiler that Inductor would use: ``$CXX``, else the first of the usual names on PATH."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    return None
