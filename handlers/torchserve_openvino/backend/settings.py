"""What every stage needs to know of the configuration, passed along instead of reached for."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchserve_openvino.backend import _openvino_private as upstream
from torchserve_openvino.config import ResolvedOptions
from torchserve_openvino.ops import SupportTable, decomposition_table
from torchserve_openvino.report import Tracker


@dataclass
class BackendSettings:
    """One compiled model's settings.

    Attributes:
        device: OpenVINO device string.
        ov_config: Properties for ``compile_model``.
        fallback_to: ``eager`` or ``inductor`` for a subgraph that OpenVINO can't compile.
        support: Who may run on OpenVINO.
        decompositions: What AOTAutograd lowers with.
        tracker: Where everything is counted.
        own_weights: Whether compiled models keep weights of their own, so that the module's can be freed.
    """

    device: str
    ov_config: Mapping[str, Any]
    fallback_to: str
    support: SupportTable
    tracker: Tracker
    decompositions: dict[Any, Any] = field(default_factory=dict)
    own_weights: bool = False

    @classmethod
    def of(cls, resolved: ResolvedOptions, tracker: Tracker, own_weights: bool = False) -> "BackendSettings":
        """Derives the settings from validated options, and states them in the report."""
        options = resolved.options
        support = SupportTable(upstream.upstream_supported(), options.disabled_ops)
        ov_config = options.ov_config()
        tracker.config.update(
            backend="openvino",
            options=resolved.to_dict(),
            ov_config={name: str(value) for name, value in ov_config.items()},
            effective_device=options.device,
            effective_precision=str(ov_config.get("INFERENCE_PRECISION_HINT", "")) or "chosen by the device",
        )
        if options.model_caching or "CACHE_DIR" in ov_config:
            tracker.cache.update(enabled=True, directory=str(ov_config.get("CACHE_DIR", "")), hits=0, misses=0)
        else:
            tracker.cache.update(enabled=False)
        if not options.aot_autograd:
            tracker.add_note("aot_autograd: false has no effect: this backend always lowers through AOTAutograd")
        fallback_to = options.fallback_to
        if fallback_to == "inductor" and cpp_compiler() is None:
            tracker.add_note("fallback to inductor was asked for, but no C++ compiler is on PATH: eager is used")
            fallback_to = "eager"
        return cls(
            device=options.device,
            ov_config=ov_config,
            fallback_to=fallback_to,
            support=support,
            tracker=tracker,
            decompositions=decomposition_table(support, upstream.kept_whole(), options.decompositions),
            own_weights=own_weights,
        )


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use: ``$CXX``, else the first of the usual names on PATH."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    return None
