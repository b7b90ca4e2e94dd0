"""Widens the kernels of convolutions that oneDNN computes wrongly in bfloat16 and in 8 bits (OpenVINO 2026.4, AMX).

Two kinds of convolutions give wrong results, without a message, where the CPU plugin chooses oneDNN's kernels for AMX
(`brgconv_avx512_amx_bf16` and `..._i8`):

- one whose result has a single column and several rows, with a stride along the width:
  ``nn.Conv2d(48, 64, 4, stride=4)`` of a picture that is 4 to 7 pixels wide. The stride has no meaning then: it becomes
  1, and columns that the kernel does not read are cut off.
- one of less than 32 channels (64 in 8 bits) whose rows of weights, ``width * channels``, fill several blocks of 32
  (64) exactly: patches of 8 x 8 of 24 channels, ``nn.Conv1d(8, 64, 16)``. Such a kernel gets a column of zeros.

The columns that are added have weights of 0, and the padding behind the input grows by as many, so that the result
stays the same as long as what they read is finite (docs/limits.md). Which precision computes is not known here; in
float32 the kernels cost their additional columns. tests/contract/test_openvino_convolutions.py shows both faults.
"""

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset15 as ops

from torchserve_openvino.ops.openvino_values import zero
from torchserve_openvino.passes.ov.fused_chains import upstream
from torchserve_openvino.passes.ov.kernel_fusions import is_dequantized
from torchserve_openvino.passes.ov.rewiring import put_behind
from torchserve_openvino.passes.pass_context import PassContext

_KINDS = {"Convolution": ops.convolution, "GroupConvolution": ops.group_convolution}
# What may stand between integers and the weights that they are.
_SCALES = frozenset({"Convert", "Multiply", "Subtract", "Reshape"})
# Channels that fill a row of a tile in bfloat16 and in 8 bits.
_BLOCK, _BLOCK_OF_BYTES = 32, 64


def widen_kernels(model: ov.Model, _: PassContext) -> None:
    """Replaces convolutions that would be wrong, in place."""
    changed = False
    for node in model.get_ordered_ops():
        explicit = node.get_type_name() in _KINDS and node.get_attributes()["auto_pad"] == "explicit"
        if explicit and node.input_value(1).get_partial_shape().is_static:
            changed |= _widen(node)
    if changed:
        model.validate_nodes_and_infer_types()


def _widen(node: ov.Node) -> bool:
    attributes = node.get_attributes()
    strides, dilation = list(attributes["strides"]), attributes["dilations"][-1]
    begin, end = list(attributes["pads_begin"]), list(attributes["pads_end"])
    value, weights = node.input_value(0), node.input_value(1)
    shape = weights.get_shape()
    width, channels = shape[-1], shape[-len(strides) - 1]
    columns, inside = node.get_output_partial_shape(0)[-1], value.get_partial_shape()[-1]
    wider = width
    if columns == 1 and inside.is_static and strides[-1] > 1:
        reads = (width - 1) * dilation + 1 - begin[-1]
        if 0 < reads < inside.get_length():
            # Zeros in the kernel would do as well, but 0 times infinity is NaN.
            value = ops.slice(value, [0], [reads], [1], [-1]).output(0)
        end[-1] = reads - min(reads, inside.get_length())
        strides[-1] = 1
    if _fills_blocks(wider * channels, channels, _BLOCK_OF_BYTES if _is_of_bytes(weights) else _BLOCK):
        wider += 1
        end[-1] += dilation
    if wider == width and strides[-1] == attributes["strides"][-1]:
        return False
    convolution = _KINDS[node.get_type_name()](
        value, _widened(weights, wider - width), strides, begin, end, attributes["dilations"]
    )
    convolution.set_friendly_name(node.get_friendly_name())
    put_behind(node.output(0), lambda _: convolution)
    return True


def _fills_blocks(row: int, channels: int, block: int) -> bool:
    # Channels of an odd number are not packed so.
    return channels < block and channels % 2 == 0 and row > block and row % block == 0


def _is_of_bytes(weights: ov.Output) -> bool:
    nodes = upstream(weights.get_node(), _SCALES)
    return any(is_dequantized(node) or node.get_type_name() == "FakeQuantize" for node in nodes)


def _widened(weights: ov.Output, columns: int) -> ov.Output:
    """Adds columns of zeros; to the integers that weights are made of where possible, so that 8 bits stay 8 bits."""
    if not columns:
        return weights
    chain = _widened_integers(weights, columns) if _is_of_bytes(weights) else None
    if chain is not None:
        return chain
    rank = len(weights.get_shape())
    begin, end = np.zeros(rank, np.int64), np.zeros(rank, np.int64)
    end[-1] = columns
    return ops.pad(
        weights, ops.constant(begin), ops.constant(end), "constant", zero(weights.get_element_type())
    ).output(0)


def _widened_integers(value: ov.Output, columns: int) -> ov.Output | None:
    """Follows casts and scales back to the constant, and widens that; returns None where there is something else."""
    node = value.get_node()
    kind = node.get_type_name()
    if kind == "Constant":
        return ops.constant(_with_zeros(np.asarray(node.data), columns)).output(0)
    if kind not in {"Convert", "Multiply"} or len(value.get_shape()) == 0:
        return None
    source = _widened_integers(node.input_value(0), columns)
    if source is None:
        return None
    if kind == "Convert":
        return ops.convert(source, node.get_element_type()).output(0)
    scale = node.input_value(1)
    if scale.get_shape() and scale.get_shape()[-1] != 1:
        return None
    return ops.multiply(source, scale).output(0)


def _with_zeros(array: NDArray[np.generic], columns: int) -> NDArray[np.generic]:
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, columns)])
