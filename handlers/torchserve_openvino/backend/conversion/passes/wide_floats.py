"""Computes in float32 what OpenVINO's CPU plugin computes wrongly, or not at all, in bfloat16 (OpenVINO 2026.4).

A running sum of bfloat16 is rounded after each value, so that it stands still once it is 256 times as large as the next
one; group normalization has no such kernel, and the whole model fails to compile. Eager PyTorch uses float32.
tests/contract/test_openvino_digits.py shows both.
"""

import openvino as ov
from openvino import opset15 as ops

from torchserve_openvino.backend.conversion.passes.rewiring import put_behind

_NARROW = frozenset({"CumSum", "GroupNormalization"})


def widen_floats(model: ov.Model) -> None:
    """Lets such operators take and return float32, with a conversion before and after them, in place."""
    narrow = [node for node in model.get_ordered_ops() if node.get_type_name() in _NARROW and _is_bfloat16(node)]
    for node in narrow:
        for port in node.inputs():
            if port.get_element_type() == ov.Type.bf16:
                port.replace_source_output(ops.convert(port.get_source_output(), ov.Type.f32).output(0))
        put_behind(node.output(0), lambda value: ops.convert(value, ov.Type.bf16))
    if narrow:
        model.validate_nodes_and_infer_types()


def _is_bfloat16(node: ov.Node) -> bool:
    return bool(node.get_element_type() == ov.Type.bf16)
