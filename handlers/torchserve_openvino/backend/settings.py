"""What every stage needs to know of the configuration, passed along instead of reached for."""

import functools
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchserve_openvino.backend.instrumentation import NOT_INSTRUMENTED, Instrumentation
from torchserve_openvino.backend.routes.partition_cache import PartitionCache
from torchserve_openvino.backend.runtime.execute import EagerCopy
from torchserve_openvino.backend.runtime.memory import OutputMemory
from torchserve_openvino.backend.upstream._openvino_private import use_libraries
from torchserve_openvino.cache.identity.mapping_print import mappings_digest
from torchserve_openvino.cache.storage.layers import Layers
from torchserve_openvino.config import ResolvedOptions
from torchserve_openvino.ops.mappings import Mappings, registered
from torchserve_openvino.report import Tracker

if TYPE_CHECKING:
    from torchserve_openvino.ops import SupportTable

logger = logging.getLogger(__name__)


@dataclass
class BackendSettings:
    """One compiled model's settings.

    Attributes:
        resolved: The validated options.
        device: OpenVINO device string.
        ov_config: Properties for ``compile_model``.
        fallback_to: ``eager`` or ``inductor`` for a subgraph that OpenVINO can't compile.
        tracker: Where everything is counted.
        own_weights: Whether compiled models keep weights of their own, so that the module's can be freed.
        partitions: The cache; None without one.
        eager_copy: Whether PyTorch's weights are still there.
        memory: Where answers are written to.
        mappings: Operators and modules that the user mapped.
        instrumentation: Hooks of a diagnosis.
        backend: ``openvino``, ``openvino_ts`` or ``export``: who captures, and who converts.
    """

    resolved: ResolvedOptions
    device: str
    ov_config: Mapping[str, Any]
    fallback_to: str
    tracker: Tracker
    own_weights: bool = False
    partitions: PartitionCache | None = None
    eager_copy: EagerCopy = field(default_factory=EagerCopy)
    memory: OutputMemory = field(default_factory=OutputMemory)
    mappings: Mappings = field(default_factory=Mappings)
    instrumentation: Instrumentation = NOT_INSTRUMENTED
    backend: str = "openvino"

    @classmethod
    def of(
        cls,
        resolved: ResolvedOptions,
        tracker: Tracker,
        own_weights: bool = False,
        store: Layers | None = None,
        for_level: bool = False,
        backend: str = "openvino",
    ) -> "BackendSettings":
        """Derives the settings from validated options, and states them in the report."""
        options = resolved.options
        ov_config = options.ov_config()
        tracker.config.update(
            backend=backend,
            options=resolved.to_dict(),
            ov_config={name: str(value) for name, value in ov_config.items()},
            effective_device=options.device,
            effective_precision=str(ov_config.get("INFERENCE_PRECISION_HINT", "")) or "chosen by the device",
        )
        if not options.aot_autograd:
            tracker.add_note("aot_autograd: false has no effect: this backend always lowers through AOTAutograd")
        mappings = registered()
        use_libraries(mappings.libraries)
        fallback_to = options.fallback_to
        if fallback_to == "inductor" and cpp_compiler() is None:
            tracker.add_note("fallback to inductor was asked for, but no C++ compiler is on PATH: eager is used")
            fallback_to = "eager"
        partitions = None
        mapped, unknown = mappings_digest(mappings)
        for what in unknown if store is not None else ():
            tracker.cache.refused[f"{what} can't be made part of the key, so nothing is cached"] += 1
        if store is not None and not unknown:
            tracker.cache.enabled = True

            def events() -> dict[str, Any]:
                # A store of several layers sums up anew each time it is asked.
                return store.events.to_dict()

            tracker.cache.events = events
            partitions = PartitionCache(
                store, options.device, ov_config, tracker.cache, for_level, mapped, converter_of(backend)
            )
        return cls(
            resolved,
            options.device,
            ov_config,
            fallback_to,
            tracker,
            own_weights,
            partitions,
            mappings=mappings,
            backend=backend,
        )

    @property
    def converter(self) -> str:
        """How a partition becomes an ov.Model: ``fx``, or ``ts`` through TorchScript."""
        return converter_of(self.backend)

    # What only tracing needs, and what takes a second to import.

    @functools.cached_property
    def support(self) -> "SupportTable":
        """Who may run on OpenVINO."""
        from torchserve_openvino.backend.upstream._openvino_private import frontend_converts, upstream_supported
        from torchserve_openvino.ops import SupportTable, is_composite

        disabled, libraries = self.resolved.options.disabled_ops, self.mappings.libraries
        # torch.export keeps them whole.
        for name in disabled if self.backend != "export" else ():
            if is_composite(name):
                logger.warning(
                    "disabled_ops: %s has no effect: torch takes it apart before a backend sees it; "
                    "name the operators that it is made of",
                    name,
                )
        return SupportTable(
            upstream_supported(),
            disabled,
            converts=frontend_converts,
            own=self.converter == "fx",
            # What a function or a library of the user's converts is the user's to answer for.
            mapped=lambda name: (
                self.mappings.covers(name)
                or (bool(libraries) and frontend_converts(name, libraries) and not frontend_converts(name))
            ),
        )

    @functools.cached_property
    def decompositions(self) -> dict[Any, Any]:
        """What AOTAutograd lowers with."""
        from torchserve_openvino.backend.upstream._openvino_private import undecomposed
        from torchserve_openvino.ops import decomposition_table

        return decomposition_table(self.support, undecomposed(), self.resolved.options.decompositions)


def converter_of(backend: str) -> str:
    """Which of OpenVINO's frontends a backend converts with, ``fx`` or ``ts``."""
    return "ts" if backend == "openvino_ts" else "fx"


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use: ``$CXX``, else the first of the usual names on PATH."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    return None
