"""Turns model-config.yaml and torch.compile's options into checked settings, with the source of each value."""

import importlib
from typing import TYPE_CHECKING, Any

from torchserve_openvino.config.options import BackendOptions, ResolvedOptions, resolve_options
from torchserve_openvino.config.problems import ConfigErrors

if TYPE_CHECKING:
    from torchserve_openvino.config.pt2 import CompileConfig
    from torchserve_openvino.config.sections.handler import OpenVINOSection
    from torchserve_openvino.config.serving import ServingConfig, load_serving_config

__all__ = [
    "BackendOptions",
    "CompileConfig",
    "ConfigErrors",
    "OpenVINOSection",
    "ResolvedOptions",
    "ServingConfig",
    "load_serving_config",
    "resolve_options",
]

# Compiling a model from Python needs no YAML: pydantic and PyYAML are only imported with the names that need them.
_HOMES = {
    "CompileConfig": "torchserve_openvino.config.pt2",
    "OpenVINOSection": "torchserve_openvino.config.sections.handler",
    "ServingConfig": "torchserve_openvino.config.serving",
    "load_serving_config": "torchserve_openvino.config.serving",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
