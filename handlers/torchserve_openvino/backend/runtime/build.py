"""Fourth stage: compiles an ov.Model to a CompiledModel, or imports a stored blob as one."""

import functools
import os
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch

from torchserve_openvino.backend.runtime.crashes.compile_trial import trial_of_file, trial_of_model
from torchserve_openvino.backend.runtime.crashes.journal import (
    Journal,
    Mode,
    Subject,
    subject_of_blob,
    subject_of_model,
)
from torchserve_openvino.backend.runtime.crashes.survive import survive
from torchserve_openvino.backend.runtime.own_weights import compile_from_file
from torchserve_openvino.backend.spec import Interface
from torchserve_openvino.backend.upstream._openvino_private import core, plugin_library
from torchserve_openvino.config.openvino.precisions import BF16X3, runtime_requirements
from torchserve_openvino.config.openvino.properties import PRECISION
from torchserve_openvino.ops.mappings import registered
from torchserve_openvino.passes.lists import OV_PASSES
from torchserve_openvino.passes.manager import due, run_passes
from torchserve_openvino.passes.ov.fused_chains import NO_FUSION, crashes_plugin
from torchserve_openvino.passes.pass_context import PassContext
from torchserve_openvino.report.records import BF16X3_SUFFIX, Kernel, PartitionRecord, quantizes
from torchserve_openvino.report.tracker import Tracker

# With symbolic sizes, the CPU plugin caches the kernels that it made for each size: by default up to 5000 per compiled
# model, about 1 MB each. Making one again is cheap, because oneDNN below it caches its last 1024 in a fifth of that
# memory: 100 were as fast as 1000 with 16 lengths of an encoder, and with 6 batch sizes of a convolutional network.
_KEPT_KERNELS = {"CPU_RUNTIME_CACHE_CAPACITY": 100}

# Each kernel's time is counted, which takes 0.6 us per kernel.
_TIMED = {"PERF_COUNT": True}
# By default, the CPU plugin rounds what is multiplied by weights of few bits to 8 bits: up to 1 % off.
_EXACT = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


@dataclass
class Built:
    """A compiled model and how it was obtained.

    Attributes:
        from_cache: Whether nothing was compiled: it was imported, or OpenVINO's own CACHE_DIR had it.
        keep_alive: Memory that the compiled model uses.
        note: Why it is compiled otherwise than usual; empty if it is not.
        products: As in `PartitionRecord`; not empty in the precision bf16x3.
    """

    compiled: ov.CompiledModel
    seconds: float
    from_cache: bool
    execution_devices: list[str]
    keep_alive: Any = None
    note: str = ""
    products: dict[str, int] = field(default_factory=dict)


def build(
    model: ov.Model,
    device: str,
    config: Mapping[str, Any],
    own_weights: bool = False,
    journal: Journal | None = None,
    name: str = "",
) -> Built:
    """Compiles a model; with CACHE_DIR in ``config``, OpenVINO stores its blob there, keyed on weights and options.

    Args:
        model: The model.
        device: Device to compile for.
        config: Properties for ``compile_model``.
        own_weights: Whether the compiled model must not share memory with the tensors that ``model`` was made from.
        journal: Remembers what is compiled, in case that the process dies; None to do without.
        name: Where the report shows it.

    Raises:
        CompileDiedError: An earlier process died of it.
        RuntimeError: The plugin refused the model; with its own message.
    """
    start = time.perf_counter()
    model, products = _for_device(model, config)
    compiled, note = _compiled(model, device, config, own_weights, journal, name)
    # Every device has this property, but none lists it as supported.
    return _built(compiled, start, bool(compiled.get_property("LOADED_FROM_CACHE")), note=note, products=products)


def _for_device(model: ov.Model, config: Mapping[str, Any]) -> tuple[ov.Model, dict[str, int]]:
    """Returns the model to compile, and `PartitionRecord.products`; the model itself stays as the cache stores it."""
    context = PassContext(config=config)
    if not due(OV_PASSES, "device", context):
        return model, {}
    copy = model.clone()
    run_passes(OV_PASSES, "device", copy, context)
    return copy, context.products


def _compiled(
    model: ov.Model, device: str, config: Mapping[str, Any], own_weights: bool, journal: Journal | None, name: str
) -> tuple[ov.CompiledModel, str]:
    """Returns the compiled model, and why it is compiled otherwise than usual."""
    unfused_at = _crashes(model, device)
    # Fusion is an affair of the CPU plugin.
    modes: list[Mode] = ["normal", "unfused", "eager"] if _is_cpu(device) and not unfused_at else ["normal", "eager"]

    def properties(mode: Mode) -> dict[str, Any]:
        return _properties(device, config, unfused=bool(unfused_at) or mode == "unfused")

    def compile(mode: Mode) -> ov.CompiledModel:
        if own_weights:
            return compile_from_file(model, lambda ready: core().compile_model(ready, device, properties(mode)))
        return core().compile_model(model, device, properties(mode))

    def trial(mode: Mode) -> str:
        return trial_of_model(model, device, properties(mode), [*registered().libraries, *extension_libraries(config)])

    def describe() -> Subject:
        return subject_of_model(model, name, device, config, device_facts(device))

    compiled, note = survive(journal, describe, modes, compile, trial)
    if unfused_at:
        note = f"OpenVINO would crash while fusing elementwise operators at {unfused_at}: compiled without fusion"
    return compiled, note


def _is_cpu(device: str) -> bool:
    return device.partition(".")[0] == "CPU"


def _crashes(model: ov.Model, device: str) -> str:
    """Returns the operator at which the CPU plugin might crash (`fused_chains.py`); empty for none, or GPU and NPU."""
    if device.startswith(("GPU", "NPU")) or not (operator := crashes_plugin(model)):
        return ""
    if not _is_cpu(device):
        # AUTO, HETERO and others do not pass the property on: it is set for all that this process compiles from now on.
        core().set_property("CPU", NO_FUSION)
    return operator


def _properties(device: str, config: Mapping[str, Any], unfused: bool = False) -> dict[str, Any]:
    if device.partition(":")[0] == "AUTO":
        # OpenVINO would answer on the CPU until the other device is ready: what was verified would not serve.
        return {"ENABLE_STARTUP_FALLBACK": False, **config}
    if not _is_cpu(device):
        return dict(config)
    fusion = NO_FUSION if unfused else {}
    return {**_KEPT_KERNELS, **_TIMED, **_EXACT, **fusion, **plugin_config(config)}


def _built(
    compiled: ov.CompiledModel,
    start: float,
    from_cache: bool,
    keep_alive: Any = None,
    note: str = "",
    products: Mapping[str, int] | None = None,
) -> Built:
    devices = [str(name) for name in _property(compiled, "EXECUTION_DEVICES", [])]
    return Built(compiled, time.perf_counter() - start, from_cache, devices, keep_alive, note, dict(products or {}))


def build_from_ir(
    xml: bytes, weights: Path, device: str, config: Mapping[str, Any], journal: Journal | None = None, name: str = ""
) -> Built:
    """Compiles a stored IR; its weights are mapped, not copied.

    Args:
        xml: The IR.
        weights: Its weights.
        device: As for `build`, like the others.

    Raises:
        CompileDiedError: An earlier process died of it.
        RuntimeError: OpenVINO can't read or compile it.
    """
    start = time.perf_counter()
    mapped = _mapped(weights)
    model, products = _for_device(core().read_model(xml, mapped), config)
    compiled, note = _compiled(model, device, config, False, journal, name)
    return _built(compiled, start, False, mapped, note, products)


def compile_as_is(
    model: ov.Model | Path, device: str, properties: Mapping[str, Any], journal: Journal | None, name: str
) -> ov.CompiledModel:
    """Compiles a model with these properties only.

    Args:
        model: The model, or its IR.
        device: Device to compile for.
        properties: For ``compile_model``.
        journal: As for `build`.
        name: What it is, for messages.

    Raises:
        CompileDiedError: An earlier process died of it.
        RuntimeError: OpenVINO can't read or compile it.
    """

    def compile(mode: Mode) -> ov.CompiledModel:
        return core().compile_model(model, device, dict(properties))

    def trial(mode: Mode) -> str:
        if isinstance(model, Path):
            return trial_of_file(model, device, properties)
        return trial_of_model(model, device, properties, registered().libraries)

    def describe() -> Subject:
        described = core().read_model(model) if isinstance(model, Path) else model
        return subject_of_model(described, name, device, properties, device_facts(device))

    return survive(journal, describe, ["normal", "eager"], compile, trial)[0]


def import_blob(
    path: Path,
    device: str,
    config: Mapping[str, Any],
    journal: Journal | None = None,
    note: str = "",
    products: Mapping[str, int] | None = None,
) -> Built:
    """Imports a stored compiled model; the file is mapped, not copied.

    Args:
        path: The blob; the file's name is a digest of its content.
        device: As for `build`, like ``config`` and ``journal``.
        note: As in `Built`, from when it was compiled; ``products``, too.

    Raises:
        CompileDiedError: An earlier process died of it.
        RuntimeError: OpenVINO refuses it: another version, another instruction set, or damage.
    """
    start = time.perf_counter()
    mapped, properties = _mapped(path), _properties(device, config)

    def load(mode: Mode) -> ov.CompiledModel:
        return core().import_model(mapped, device, properties)

    def describe() -> Subject:
        return subject_of_blob(path.name, f"blob {path.name[:12]} of the cache", device, config, device_facts(device))

    def trial(mode: Mode) -> str:
        return trial_of_file(path, device, properties, registered().libraries, blob=True)

    compiled = survive(journal, describe, ["normal", "eager"], load, trial)[0]
    return _built(compiled, start, True, mapped, note, products)


def _mapped(path: Path) -> ov.Tensor:
    """Maps a file privately (copy-on-write), because OpenVINO requires writable memory."""
    if path.stat().st_size == 0:
        return ov.Tensor(np.zeros(0, dtype=np.uint8))
    return ov.Tensor(np.memmap(path, dtype=np.uint8, mode="c"), shared_memory=True)


def export_blob(compiled: ov.CompiledModel) -> bytes | None:
    """Exports the compiled model as bytes; returns None if the device can't export."""
    try:
        return bytes(compiled.export_model().getbuffer())
    except RuntimeError:
        # AUTO, MULTI and some plugins raise "not implemented".
        return None


def note_built(built: Built, interface: Interface, record: PartitionRecord, tracker: Tracker) -> None:
    """Records what was built in the partition's record."""
    record.inputs, record.outputs = len(interface.inputs), len(interface.outputs)
    record.constants = interface.arguments - len(interface.inputs)
    record.constant_bytes = interface.constant_bytes
    record.compile_seconds += built.seconds
    record.from_cache = built.from_cache
    record.execution_devices = built.execution_devices
    record.products = built.products
    # Weakly: the report must not keep a model alive that was dropped.
    compiled = weakref.ref(built.compiled)
    tracker.watch_kernels(record, lambda: kernels_of(current) if (current := compiled()) is not None else [])
    if built.note:
        tracker.add_note(built.note)
    if precision := _computes_in(built, record):
        tracker.note_precision(precision)


def _computes_in(built: Built, record: PartitionRecord) -> str:
    precision = effective_precision(built.compiled)
    quantized = precision == "f32" and quantizes(record.op_counts)
    return "int8" if quantized else BF16X3 if built.products else precision


def effective_precision(compiled: ov.CompiledModel) -> str:
    """Returns the precision that the plugin reports for inference, such as ``f32``; empty if it reports none."""
    value = _property(compiled, "INFERENCE_PRECISION_HINT", "")
    return str(getattr(value, "get_type_name", lambda: value)())


def _property(compiled: ov.CompiledModel, name: str, default: Any) -> Any:
    """Returns a property of the compiled model; ``default`` if the device does not have it."""
    supported = compiled.get_property("SUPPORTED_PROPERTIES")
    return compiled.get_property(name) if name in supported else default


def device_capabilities(device: str) -> list[str]:
    """Returns the types that a hardware device computes fast, by OpenVINO's names: ``FP32``, ``BF16``, ``INT8``, ..."""
    return [str(name) for name in core().get_property(device, "OPTIMIZATION_CAPABILITIES")]


_DRIVERS = ("GPU_DRIVER_VERSION", "NPU_DRIVER_VERSION")


@functools.lru_cache(maxsize=32)
def device_facts(device: str) -> dict[str, Any]:
    """Returns what a compiled blob depends on besides its model: the hardware behind a device string, JSON-safe."""
    capability = torch.backends.cpu.get_cpu_capability()
    names: dict[str, str] = {}
    fast: dict[str, list[str]] = {}
    for member in _members(device):
        names[member] = str(core().get_property(member, "FULL_DEVICE_NAME"))
        fast[member] = device_capabilities(member)
    # oneDNN's own variable, which makes it compile for a lesser CPU.
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    drivers = {member: versions for member in names if (versions := _driver_versions(member))}
    facts = {"names": names, "fast": fast, "cpu": capability, "limit": limit}
    return {**facts, "drivers": drivers} if drivers else facts


def _driver_versions(device: str) -> dict[str, str]:
    """Returns what a device's compiled blobs depend on besides its name; empty for a CPU."""
    supported = core().get_property(device, "SUPPORTED_PROPERTIES")
    return {name: str(core().get_property(device, name)) for name in _DRIVERS if name in supported}


def _members(device: str) -> list[str]:
    """Returns the hardware devices behind a name such as ``AUTO:GPU,CPU``; all available ones for a bare ``AUTO``."""
    name, _, members = device.partition(":")
    if name.split(".")[0] in {"AUTO", "MULTI", "HETERO", "BATCH"}:
        names = [member.split("(")[0] for member in members.split(",") if member]
        excluded = {name[1:] for name in names if name.startswith("-")}
        present = [device for device in core().available_devices if not excluded & {device, device.split(".")[0]}]
        return [name for name in names if not name.startswith("-")] or present
    return [device]


def cpu_level() -> str:
    """Returns the CPU's instruction set as OpenVINO writes it into blobs, ``meta=1.0;ov=2026.4.1;isa=Intel AVX2``."""
    return runtime_requirements()


# --- executed kernels, their precision and time -------------------------------------------------------------------
# OpenVINO's runtime model says it. Times are averages over all calls; they are there on devices that count
# (``PERF_COUNT``), once there was a call.


# Nodes that compute nothing.
_IDLE = {"Input", "Output", "Const", "Constant", "Parameter", "Result"}


def kernels_of(compiled: ov.CompiledModel) -> list[Kernel]:
    """Returns the kernels of a compiled model in their order; none where the device does not tell."""
    try:
        operations = compiled.get_runtime_model().get_ordered_ops()
    except RuntimeError:
        return []
    kernels = [_kernel(operation) for operation in operations]
    return [kernel for kernel in kernels if kernel is not None and kernel.kind not in _IDLE]


def _kernel(operation: Any) -> Kernel | None:
    facts = operation.get_rt_info()

    def fact(name: str) -> str:
        return str(facts[name].astype(str)) if name in facts else ""

    kind = fact("layerType")
    if not kind:
        return None
    time = fact("execTimeMcs")
    names = tuple(name for name in fact("originalLayersNames").split(",") if name)
    seconds = int(time) * 1e-6 if time.isdigit() else None
    precision = fact("runtimePrecision").lower()
    if precision == "bf16" and any(name.endswith(BF16X3_SUFFIX) for name in names):
        precision = "bf16x3"
    return Kernel(kind, precision, fact("primitiveType"), names, seconds)


# --- properties and libraries for a model in the precision bf16x3, which OpenVINO itself does not have ------------


def plugin_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the properties for the plugin: what is not split stays in f32."""
    return {**config, PRECISION: "f32"} if config.get(PRECISION) == BF16X3 else dict(config)


def extension_libraries(config: Mapping[str, Any]) -> list[Path]:
    """Returns the libraries with operations of such a model."""
    return [plugin_library()] if config.get(PRECISION) == BF16X3 else []
