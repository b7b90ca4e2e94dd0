"""Properties and libraries for a model in the precision bf16x3, which OpenVINO itself does not have."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchserve_openvino.backend.upstream._openvino_relaxed import plugin_library
from torchserve_openvino.config.openvino.precisions import BF16X3
from torchserve_openvino.config.openvino.properties import PRECISION


def plugin_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the properties for the plugin: what is not split stays in f32."""
    return {**config, PRECISION: "f32"} if config.get(PRECISION) == BF16X3 else dict(config)


def extension_libraries(config: Mapping[str, Any]) -> list[Path]:
    """Returns the libraries with operations of such a model."""
    return [plugin_library()] if config.get(PRECISION) == BF16X3 else []
