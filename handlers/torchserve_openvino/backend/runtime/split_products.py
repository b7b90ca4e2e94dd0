"""What the precision bf16x3 changes when a model is compiled: OpenVINO itself knows nothing about it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openvino as ov

from torchserve_openvino.backend.conversion.passes.bf16x3 import multiply_in_bf16x3
from torchserve_openvino.backend.upstream._openvino_relaxed import plugin_library
from torchserve_openvino.config.openvino.precisions import BF16X3
from torchserve_openvino.config.openvino.properties import PRECISION


def with_split_products(model: ov.Model, config: Mapping[str, Any]) -> tuple[ov.Model, dict[str, int]]:
    """Returns the model to compile, and `PartitionRecord.products`; the model itself stays as it is."""
    if config.get(PRECISION) != BF16X3:
        return model, {}
    changed, share = multiply_in_bf16x3(model)
    return changed, share.to_dict()


def plugin_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the properties for the plugin: what is not split stays in f32."""
    return {**config, PRECISION: "f32"} if config.get(PRECISION) == BF16X3 else dict(config)


def extension_libraries(config: Mapping[str, Any]) -> list[Path]:
    """Returns the libraries with operations of such a model."""
    return [plugin_library()] if config.get(PRECISION) == BF16X3 else []
