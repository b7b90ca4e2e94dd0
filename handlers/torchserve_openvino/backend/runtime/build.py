"""Fourth stage: ov.Model to CompiledModel, or a stored blob to one."""

import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13

from torchserve_openvino.backend.conversion.fused_chains import NO_FUSION, crashes_plugin
from torchserve_openvino.backend.runtime.own_weights import compile_from_file
from torchserve_openvino.backend.spec import Interface
from torchserve_openvino.backend.upstream._openvino_private import core
from torchserve_openvino.report.tracker import PartitionRecord, Tracker

# With symbolic sizes the CPU plugin keeps the kernels that it made for each: 5000 of a compiled model where nothing is
# said, about 1 MB each. Making one again is cheap, for oneDNN below keeps the last 1024 of its own in a fifth of that:
# 100 were as fast as 1000 with 16 lengths of an encoder, and with 6 batch sizes of a convolutional network.
_KEPT_KERNELS = {"CPU_RUNTIME_CACHE_CAPACITY": 100}


@dataclass
class Built:
    """A compiled model and how it came about.

    Attributes:
        from_cache: Nothing was compiled: it was imported, or OpenVINO's own CACHE_DIR had it.
        keep_alive: Memory that the compiled model uses.
        unfused_at: An operator for which fusing is left out; see `fused_chains.py`.
    """

    compiled: ov.CompiledModel
    seconds: float
    from_cache: bool
    execution_devices: list[str]
    keep_alive: Any = None
    unfused_at: str = ""


def build(model: ov.Model, device: str, config: Mapping[str, Any], own_weights: bool = False) -> Built:
    """Compiles a model; with CACHE_DIR in ``config`` OpenVINO keeps its blob there, keyed on weights and options.

    Args:
        own_weights: Whether the compiled model must not share memory with the tensors that ``model`` was made of.

    Raises:
        RuntimeError: The plugin refused the model; its own message.
    """
    start = time.perf_counter()
    unfused_at = _crashes(model, device)

    def compile(ready: ov.Model) -> ov.CompiledModel:
        return core().compile_model(ready, device, _properties(device, config, unfused_at))

    compiled = compile_from_file(model, compile) if own_weights else compile(model)
    # Every device has it, none lists it.
    return _built(compiled, start, bool(compiled.get_property("LOADED_FROM_CACHE")), unfused_at=unfused_at)


def _is_cpu(device: str) -> bool:
    return device.partition(".")[0] == "CPU"


def _crashes(model: ov.Model, device: str) -> str:
    """Where the CPU plugin might crash on a model (`fused_chains.py`), if it is to see it."""
    if device.startswith(("GPU", "NPU")) or not (operator := crashes_plugin(model)):
        return ""
    if not _is_cpu(device):
        # AUTO, HETERO and others pass no property on: all that this process compiles from now on goes without.
        core().set_property("CPU", NO_FUSION)
    return operator


def _properties(device: str, config: Mapping[str, Any], unfused_at: str = "") -> dict[str, Any]:
    if not _is_cpu(device):
        return dict(config)
    return {**_KEPT_KERNELS, **(NO_FUSION if unfused_at else {}), **config}


def _built(
    compiled: ov.CompiledModel, start: float, from_cache: bool, keep_alive: Any = None, unfused_at: str = ""
) -> Built:
    devices = [str(name) for name in _property(compiled, "EXECUTION_DEVICES", [])]
    return Built(compiled, time.perf_counter() - start, from_cache, devices, keep_alive, unfused_at)


def build_from_ir(xml: bytes, weights: Path, device: str, config: Mapping[str, Any]) -> Built:
    """Compiles a stored IR; its weights are mapped, not copied.

    Raises:
        RuntimeError: OpenVINO can't read or compile it.
    """
    start = time.perf_counter()
    mapped = _mapped(weights)
    model = core().read_model(xml, mapped)
    unfused_at = _crashes(model, device)
    compiled = core().compile_model(model, device, _properties(device, config, unfused_at))
    return _built(compiled, start, False, mapped, unfused_at)


def import_blob(path: Path, device: str, config: Mapping[str, Any]) -> Built:
    """Reads a compiled model; the file is mapped, not copied.

    Raises:
        RuntimeError: OpenVINO refuses it: another version, another instruction set, damage.
    """
    start = time.perf_counter()
    mapped = _mapped(path)
    return _built(core().import_model(mapped, device, _properties(device, config)), start, True, mapped)


def _mapped(path: Path) -> ov.Tensor:
    """A private map of a file; OpenVINO wants memory that could be written."""
    if path.stat().st_size == 0:
        return ov.Tensor(np.zeros(0, dtype=np.uint8))
    return ov.Tensor(np.memmap(path, dtype=np.uint8, mode="c"), shared_memory=True)


def export_blob(compiled: ov.CompiledModel) -> bytes | None:
    """The compiled model as bytes; None where the device has no such form."""
    try:
        return bytes(compiled.export_model().getbuffer())
    except RuntimeError:
        # AUTO, MULTI and some plugins: "not implemented".
        return None


def note_built(built: Built, interface: Interface, record: PartitionRecord, tracker: Tracker) -> None:
    """Puts down what came about into the partition's record."""
    record.inputs, record.outputs = len(interface.inputs), len(interface.outputs)
    record.constants = interface.arguments - len(interface.inputs)
    record.constant_bytes = interface.constant_bytes
    record.compile_seconds += built.seconds
    record.from_cache = built.from_cache
    record.execution_devices = built.execution_devices
    if built.unfused_at:
        tracker.add_note(
            f"OpenVINO would crash while it fuses elementwise operators at {built.unfused_at}: compiled without that"
        )
    if precision := effective_precision(built.compiled):
        tracker.config["effective_precision"] = precision


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


@functools.lru_cache(maxsize=32)
def device_facts(device: str) -> dict[str, Any]:
    """What a compiled blob depends on besides its model: the hardware behind a device string, JSON-safe."""
    capability = torch.backends.cpu.get_cpu_capability()
    names: dict[str, str] = {}
    fast: dict[str, list[str]] = {}
    for member in _members(device):
        names[member] = str(core().get_property(member, "FULL_DEVICE_NAME"))
        fast[member] = device_capabilities(member)
    # oneDNN's own switch, with which one CPU compiles for a lesser one.
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return {"names": names, "fast": fast, "cpu": capability, "limit": limit}


def _members(device: str) -> list[str]:
    """Hardware devices behind ``AUTO:GPU,CPU``; all that there are behind a bare ``AUTO``."""
    name, _, members = device.partition(":")
    if name.split(".")[0] in {"AUTO", "MULTI", "HETERO", "BATCH"}:
        return [m.split("(")[0] for m in members.split(",")] if members else list(core().available_devices)
    return [device]


@functools.lru_cache(maxsize=1)
def cpu_level() -> str:
    """The CPU's instruction set as OpenVINO writes it into its blobs, ``meta=1.0;ov=2026.4.1;isa=Intel AVX2``.

    Only a compiled model has this property, so a tiny one is compiled (40 ms).
    """
    parameter = opset13.parameter([1], np.float32)
    compiled = core().compile_model(ov.Model([opset13.relu(parameter)], [parameter]), "CPU")
    return str(compiled.get_property("RUNTIME_REQUIREMENTS"))
