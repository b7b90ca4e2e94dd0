"""Which precisions this machine's devices compute in."""

import functools
from collections.abc import Mapping
from typing import Any

from torchserve_openvino.config.openvino.properties import DEVICE_PROPERTIES, EXECUTION_MODE, PRECISION
from torchserve_openvino.config.problems import Problems
from torchserve_openvino.config.spelling import listed, nearest, shown

# Products as three products of bfloat16, summed in float32: no value of OpenVINO's INFERENCE_PRECISION_HINT.
BF16X3 = "bf16x3"
PRECISIONS = ("f32", BF16X3, "bf16", "f16")
# The values of OPTIMIZATION_CAPABILITIES that stand for a precision.
CAPABILITIES = {"FP32": "f32", "BF16": "bf16", "FP16": "f16"}
# In OpenVINO's words for an instruction set.
_AMX = "AMX with bfloat16"


@functools.lru_cache(maxsize=1)
def runtime_requirements() -> str:
    """Returns the versions and the instruction set that OpenVINO writes into models that it compiles for this CPU.

    Only a compiled model has this property, so a tiny one is compiled (40 ms).
    """
    import openvino as ov
    from openvino import opset13 as ops

    parameter = ops.parameter([1], ov.Type.f32)
    compiled = ov.Core().compile_model(ov.Model([ops.relu(parameter)], [parameter]), "CPU")
    return str(compiled.get_property("RUNTIME_REQUIREMENTS"))


def instruction_set() -> str:
    """Returns the instruction set that OpenVINO uses on the CPU, such as ``Intel AVX-512 with Intel DL Boost``.

    The system or ``ONEDNN_MAX_CPU_ISA`` may forbid what the CPU has.
    """
    return runtime_requirements().rpartition("isa=")[2]


def no_bf16x3(device: str) -> str | None:
    """Returns why a device cannot compute in bf16x3, as a sentence without its subject; None if it can."""
    if device != "CPU":
        return f"is for the device CPU only, and the device is {device}; set f32, or device: CPU."
    if _AMX not in (level := instruction_set()):
        return (
            f"needs a CPU with AMX for bfloat16; OpenVINO uses {level or 'no known instruction set'} on this one. Set "
            "f32, or auto."
        )
    return None


def unsupported(precision: str, device: str) -> str | None:
    """Returns why a device does not compute in a precision, as a sentence without its subject; None if it does.

    Args:
        precision: ``f32``, ``bf16x3``, ``bf16`` or ``f16``.
        device: An OpenVINO device. A virtual one passes the precision on, and is not checked but for bf16x3.
    """
    if precision == BF16X3:
        return no_bf16x3(device)
    if precision == "f32" or ":" in device or device == "AUTO":
        return None
    import openvino as ov

    try:
        fast = ov.Core().get_property(device, "OPTIMIZATION_CAPABILITIES")
    except RuntimeError:
        # There is no such device here, which is said where devices are checked.
        return None
    has = [name for word, name in CAPABILITIES.items() if word in fast]
    return None if precision in has else f"is not supported by {device} on this machine, which has {', '.join(has)}."


def check_precision(value: Any, device: str, config: Mapping[str, Any], present: bool, problems: Problems) -> Any:
    """Checks the option ``precision``.

    Args:
        value: As the user wrote it; None if not at all.
        device: An OpenVINO device.
        config: Checked properties.
        present: Whether the device must be one of this machine that computes in it.
        problems: Collects what is wrong.

    Returns:
        The precision; None if there is none, or if it is wrong.
    """
    if value is None:
        return None
    members = [config, *(config.get(DEVICE_PROPERTIES) or {}).values()]
    stated = [name for name in (PRECISION, EXECUTION_MODE) if any(name in member for member in members)]
    if value not in PRECISIONS:
        message = f"must be one of {listed(PRECISIONS)}, not {shown(value)}."
        problems.add(("precision",), message, suggestion=nearest(str(value), PRECISIONS))
    elif stated:
        problems.add(("precision",), f"is {value}, and config.{stated[0]} sets a precision, too; remove one of them.")
    elif (present or (value == BF16X3 and device != "CPU")) and (why := unsupported(value, device)):
        problems.add(("precision",), f"{value} {why}")
    else:
        return value
    return None
