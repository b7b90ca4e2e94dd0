"""Turns model-config.yaml and torch.compile's options into checked settings, with the source of each value."""

from typing import TYPE_CHECKING

from torchserve_openvino.config.options import BackendOptions, ResolvedOptions, resolve_options
from torchserve_openvino.config.problems import ConfigErrors
from torchserve_openvino.lazy import attributes_of

if TYPE_CHECKING:
    from torchserve_openvino.config.pt2 import CompileConfig
    from torchserve_openvino.config.sections.openvino_section import OpenVINOSection
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
    "OpenVINOSection": "torchserve_openvino.config.sections.openvino_section",
    "ServingConfig": "torchserve_openvino.config.serving",
    "load_serving_config": "torchserve_openvino.config.serving",
}

__getattr__ = attributes_of(__name__, _HOMES)
