"""Computes at conversion what depends on no input, where OpenVINO would not fold it into a constant (OpenVINO 2026.4).

OpenVINO has no constant folding for some operators, such as convolution, pooling, roll and gathering of elements. Its
CPU plugin then computes them once, while it compiles, and lets a following elementwise operator write its result to
the same memory. From the second inference on, that operator reads its own last result: ``x + positions.roll(1)``.
tests/contract/test_openvino_memory.py shows it.
"""

import numpy as np
import openvino as ov
from openvino import opset15 as ops
from openvino.passes import ConstantFolding, Manager

from torchserve_openvino.ops.openvino_values import array_of
from torchserve_openvino.passes.ov.fused_chains import NO_FUSION, is_constant
from torchserve_openvino.passes.pass_context import PassContext

_VARYING = frozenset({"Parameter", "ReadValue", "RandomUniform", "Multinomial"})
# What OpenVINO surely folds; anything else is computed here, which is right too, but costs a compilation.
_FOLDED = frozenset({
    "Constant", "Convert", "ConvertLike", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Broadcast", "Concat",
    "Slice", "StridedSlice", "ShapeOf", "Gather", "Range", "Select", "Add", "Subtract", "Multiply", "Divide", "Sqrt",
    "Power", "Abs", "Negative", "Exp", "Log", "Sin", "Cos", "Maximum", "Minimum", "Equal", "NotEqual", "Greater",
    "GreaterEqual", "Less", "LessEqual", "LogicalNot", "LogicalAnd", "LogicalOr",
})  # fmt: skip


def fold_constant_parts(model: ov.Model, context: PassContext) -> None:
    """Replaces such values with constants; changes the model in place.

    Args:
        model: The model.
        context: Has what compiles a part of it.
    """
    fold_known_shapes(model)
    varying: set[str] = set()
    unfolded: set[str] = set()
    values: list[ov.Output] = []
    for node in model.get_ordered_ops():
        name, kind = node.get_name(), node.get_type_name()
        sources = {value.get_node().get_name() for value in node.input_values()}
        if kind in _VARYING or sources & varying:
            varying.add(name)
        elif kind != "Result" and (kind not in _FOLDED or sources & unfolded):
            unfolded.add(name)
        if kind == "Result" or name in varying:
            values += [value for value in node.input_values() if value.get_node().get_name() in unfolded]
    if not values:
        return
    distinct = list({(value.get_node().get_name(), value.get_index()): value for value in values}.values())
    users = [list(value.get_target_inputs()) for value in distinct]
    part = ov.Model([ops.result(value) for value in distinct], [])
    properties = {"INFERENCE_PRECISION_HINT": "f32", **NO_FUSION}
    computed = context.compile(part, "CPU", properties).create_infer_request()
    computed.infer()
    for position, targets in enumerate(users):
        constant = ov.op.Constant(computed.get_output_tensor(position), shared_memory=False)
        for target in targets:
            target.replace_source_output(constant.output(0))


def fold_known_shapes(model: ov.Model) -> None:
    """A known shape does not depend on the value that it is the shape of."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ShapeOf" and (shape := node.get_input_partial_shape(0)).is_static:
            constant = ops.constant(np.array(shape.to_shape(), node.get_output_element_type(0).to_dtype()))
            for target in list(node.output(0).get_target_inputs()):
                target.replace_source_output(constant.output(0))


def constant_value(value: ov.Output) -> np.ndarray | None:
    """Returns the value of a small constant, or of what small constants alone determine; None if it is neither."""
    node = value.get_node()
    if node.get_type_name() != "Constant":
        if not is_constant(node):
            return None
        result = ops.result(value)
        folding = Manager()
        folding.register_pass(ConstantFolding())
        folding.run_passes(ov.Model([result], []))
        node = result.input_value(0).get_node()
    return array_of(node) if node.get_type_name() == "Constant" else None
