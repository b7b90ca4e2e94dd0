"""Which kernels a compiled model runs, at which precision, and how long each takes: the truth behind every hint.

OpenVINO's runtime model says it. Times are averages over all calls; they are there on devices that count
(``PERF_COUNT``), once there was a call.
"""

from typing import Any

import openvino as ov

from torchserve_openvino.report.kernel_record import BF16X3_SUFFIX, Kernel

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
