"""Fourth stage: ov.Model to CompiledModel."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import openvino as ov

from torchserve_openvino.backend._openvino_private import core
from torchserve_openvino.backend.own_weights import compile_from_file


@dataclass
class Built:
    """A compiled model and how it came about."""

    compiled: ov.CompiledModel
    seconds: float
    from_cache: bool
    execution_devices: list[str]


def build(model: ov.Model, device: str, config: Mapping[str, Any], own_weights: bool = False) -> Built:
    """Compiles a model; with CACHE_DIR in ``config`` OpenVINO keeps its blob there, keyed on weights and options.

    Args:
        own_weights: Whether the compiled model must not share memory with the tensors that ``model`` was made of.

    Raises:
        RuntimeError: The plugin refused the model; its own message.
    """
    start = time.perf_counter()

    def compile(ready: ov.Model) -> ov.CompiledModel:
        return core().compile_model(ready, device, dict(config))

    compiled = compile_from_file(model, compile) if own_weights else compile(model)
    return Built(
        compiled=compiled,
        seconds=time.perf_counter() - start,
        # Every device has it, none lists it.
        from_cache=bool(compiled.get_property("LOADED_FROM_CACHE")),
        execution_devices=[str(name) for name in _property(compiled, "EXECUTION_DEVICES", [])],
    )


def effective_precision(compiled: ov.CompiledModel) -> str:
    """The precision that the plugin says it infers with, ``f32`` or the like; empty where it does not say."""
    value = _property(compiled, "INFERENCE_PRECISION_HINT", "")
    return str(getattr(value, "get_type_name", lambda: value)())


def _property(compiled: ov.CompiledModel, name: str, default: Any) -> Any:
    """A property of the compiled model; ``default`` where this device does not have it."""
    supported = compiled.get_property("SUPPORTED_PROPERTIES")
    return compiled.get_property(name) if name in supported else default


def device_capabilities(device: str) -> list[str]:
    """Types that a hardware device computes fast, as OpenVINO calls them: ``FP32``, ``BF16``, ``INT8``, ..."""
    return [str(name) for name in core().get_property(device, "OPTIMIZATION_CAPABILITIES")]
