"""Keeps gated products apart, ``down(silu(gate(x)) * up(x))``, where OpenVINO's CPU plugin would run on one thread.

With AMX, and bfloat16 or float16, the plugin makes one kernel of such a product (`LLMMLP` in the sources of 2026.4).
That kernel gives each half of the last product's columns to one half of the threads, and so divides by 0 while it is
compiled for one thread: the process dies by SIGFPE. tests/contract/test_openvino_attention.py shows it.
"""

from collections.abc import Mapping
from typing import Any

import openvino as ov

from torchserve_openvino.config.cores import allowed_cores
from torchserve_openvino.passes.ov.fused_chains import by_constant, is_constant
from torchserve_openvino.passes.ov.kernel_fusions import before_moves
from torchserve_openvino.passes.ov.rewiring import kept_apart, put_behind
from torchserve_openvino.passes.pass_context import PassContext


def dies_on_gated_products(config: Mapping[str, Any]) -> bool:
    """Returns True if the plugin may use that kernel, and on one thread.

    Args:
        config: Properties for ``compile_model``.
    """
    floats = str(config.get("INFERENCE_PRECISION_HINT", "")).lower()
    return floats not in {"f32", "bf16x3"} and _threads_per_stream(config) < 2


def needs_split(context: PassContext) -> bool:
    """Returns True if a model is compiled with properties for which `dies_on_gated_products` holds."""
    return dies_on_gated_products(context.config)


def split_gated_products(model: ov.Model, _: PassContext) -> None:
    """Puts an operator without effect behind each product of two computed values that weights multiply, in place."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul" and by_constant(node):
            gated = before_moves(node.input_value(0))
            factors = [value.get_node() for value in gated.get_node().input_values()]
            if gated.get_node().get_type_name() == "Multiply" and not any(map(is_constant, factors)):
                # Fused with the multiplication, so that it costs next to nothing.
                put_behind(gated, kept_apart)


def _threads_per_stream(config: Mapping[str, Any]) -> int:
    """Returns the fewest threads that a stream may have."""
    threads = int(config.get("INFERENCE_NUM_THREADS", 0)) or allowed_cores()
    streams = str(config.get("NUM_STREAMS", ""))
    if not streams:
        return 1 if "THROUGHPUT" in str(config.get("PERFORMANCE_HINT", "")) else threads
    return threads // max(int(streams), 1) if streams.isdigit() else 1
