"""Keeps masks finite, and what they let through exact, where OpenVINO computes in bfloat16.

``torch.finfo(torch.float32).min``, with which published models fill their masks, is beyond bfloat16, and rounds to
minus infinity there. A row of which everything is masked (a padded token in front of a text) is then NaN instead of a
mean; and as the next layer multiplies that NaN by 0, every token of the text is.

A mask that is computed, ``(1 - mask) * -10000``, is 0 where it lets through. Where several layers share it, OpenVINO
stores ``mask * 10000`` in bfloat16, 9984, and adds -10000 to it in each of them: -16 instead of 0, or -576 of 1e6,
beside which scores lose their digits. tests/contract/test_openvino_attention.py shows both.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import openvino as ov
import torch
from openvino import opset15 as ops

from torchserve_openvino.ops.openvino_values import array_of
from torchserve_openvino.passes.ov.fused_chains import upstream
from torchserve_openvino.passes.ov.kernel_fusions import MOVES, before_moves
from torchserve_openvino.passes.ov.rewiring import put_behind
from torchserve_openvino.passes.pass_context import PassContext

# The largest finite number of bfloat16.
_LARGEST = np.float32(2.0**127 * (2 - 2.0**-7))
# Their constants are weights: many, and never as large.
_WEIGHTED = frozenset({"MatMul", "Convolution", "GroupConvolution", "ConvolutionBackpropData", "Gather"})
# What lies between a mask that a caller gives and the scores that it is added to.
_COMPARISONS = frozenset({"Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual"})
# A shift of scores by less is no mask, and bfloat16 has few digits beside it anyway.
_LARGE = np.float32(256.0)
_PASSED = MOVES | {"Add", "Select", "Concat", "Broadcast", "Tile", "Slice", "StridedSlice", "Multiply", "Maximum"}
_COMPUTED = _PASSED | {"Subtract"}


def rounds_to_bfloat16(context: PassContext) -> bool:
    """Returns True if the plugin may compute in a type that has fewer digits than float32."""
    return str(context.config.get("INFERENCE_PRECISION_HINT", "")).lower() not in {"f32", "bf16x3"}


def round_masks(model: ov.Model, _: PassContext) -> None:
    """Rounds large constants of computed masks to bfloat16, in place, so that they cancel each other exactly."""
    for constant in {node.get_name(): node for node in _mask_constants(model)}.values():
        put_behind(constant.output(0), partial(_constant, _rounded(array_of(constant))))
    model.validate_nodes_and_infer_types()


def _mask_constants(model: ov.Model) -> Iterator[ov.Node]:
    """Yields the constants by which masks are multiplied, or that are added to them."""
    for value in _scores(model):
        for node in upstream(value.get_node(), _COMPUTED):
            is_number = node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.f32
            if is_number and not _is_weight(node) and bool((np.abs(array_of(node)) >= _LARGE).any()):
                yield node


def _rounded(values: np.ndarray) -> np.ndarray:
    """Rounds large finite values to bfloat16; others stay."""
    rounded = np.clip(torch.tensor(values).bfloat16().float().numpy(), -_LARGEST, _LARGEST)
    return np.where(np.isfinite(values) & (np.abs(values) >= _LARGE), rounded, values).astype(np.float32)


def keep_masks_finite(model: ov.Model, _: PassContext) -> None:
    """Limits finite constants, and the callers' masks, to what bfloat16 holds, in place; infinity stays infinite."""
    masks = set(_masks(model))
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.f32 and not _is_weight(node):
            values = array_of(node)
            if bool((np.isfinite(values) & (np.abs(values) > _LARGEST)).any()):
                masks.update(_compared_with(node))
                limited = np.where(np.isinf(values), values, np.clip(values, -_LARGEST, _LARGEST))
                put_behind(node.output(0), partial(_constant, limited.astype(np.float32)))
    for mask in masks:
        put_behind(mask, _limited)
    model.validate_nodes_and_infer_types()


def _constant(values: np.ndarray, _: ov.Output) -> ov.Node:
    return ops.constant(values)


def _is_weight(constant: ov.Node) -> bool:
    return all(user.get_node().get_type_name() in _WEIGHTED for user in constant.output(0).get_target_inputs())


def _compared_with(constant: ov.Node) -> Iterator[ov.Output]:
    """Yields the inputs that are compared with a constant: they have to be limited as it is."""
    for user in constant.output(0).get_target_inputs():
        if user.get_node().get_type_name() in _COMPARISONS:
            for value in user.get_node().input_values():
                yield from _inputs_behind(value)


def _masks(model: ov.Model) -> Iterator[ov.Output]:
    """Yields the inputs that are added to what a softmax takes."""
    for value in _scores(model):
        yield from _inputs_behind(value)


def _scores(model: ov.Model) -> Iterator[ov.Output]:
    """Yields what softmaxes take where it may have a mask, and the masks of attention."""
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind == "ScaledDotProductAttention" and node.get_input_size() > 3:
            yield node.input_value(3)
        elif kind in {"Softmax", "LogSoftmax"}:
            above = before_moves(node.input_value(0))
            if above.get_node().get_type_name() in _COMPUTED:
                yield above


def _inputs_behind(value: ov.Output) -> Iterator[ov.Output]:
    for node in upstream(value.get_node(), _PASSED):
        if node.get_type_name() == "Parameter" and node.get_element_type() == ov.Type.f32:
            yield node.output(0)


def _limited(mask: ov.Output) -> ov.Node:
    bounds = ops.constant(-_LARGEST), ops.constant(_LARGEST)
    return ops.select(ops.is_inf(mask), mask, ops.minimum(ops.maximum(mask, bounds[0]), bounds[1]))
