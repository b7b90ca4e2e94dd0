"""From model-config.yaml and torch.compile's options to checked settings with the source of each value."""

from torchserve_openvino.config.options import BackendOptions, ResolvedOptions, resolve_options
from torchserve_openvino.config.problems import ConfigErrors
from torchserve_openvino.config.pt2 import CompileConfig
from torchserve_openvino.config.sections import OpenVINOSection
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
