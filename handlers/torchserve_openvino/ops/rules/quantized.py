"""Quantized tensors: floats to 8-bit integers and back, as torchao, NNCF and executorch write them into a graph.

OpenVINO's CPU plugin computes in 8 bits where a FakeQuantize, or an 8-bit constant, is followed by exactly Convert,
Subtract and Multiply. So a quantization whose result is only dequantized is converted to FakeQuantize, which rounds a
value that lies halfway between two integers as its own float arithmetic says. Any other quantization is computed
step by step as torch does.
"""

from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import Output
from openvino import opset15 as ops
from torch import Tensor

# Registers the operators.
from torch.ao.quantization.fx import _decomposed  # noqa: F401
from torch.fx import Node

from torchserve_openvino.ops.names import arguments_of, op_name, value_of
from torchserve_openvino.ops.openvino_values import array_of, int64, rank
from torchserve_openvino.ops.rule_registry import Rule, declare

_TYPES = {torch.uint8: ov.Type.u8, torch.int8: ov.Type.i8}
_NUMPY = {torch.uint8: np.uint8, torch.int8: np.int8}
_FLOATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_PACKETS = torch.ops.quantized_decomposed
_DEQUANTIZE = ("quantized_decomposed.dequantize_per_tensor", "quantized_decomposed.dequantize_per_channel")


def _constant(value: Any) -> np.ndarray | None:
    """Returns the values of a constant, or of a Python number; None for what is computed."""
    if not isinstance(value, Output):
        return np.asarray(value)
    node = value.get_node()
    return array_of(node) if node.get_type_name() == "Constant" else None


def _along(values: Any, x: Output, axis: int | None) -> Any:
    """Returns float32 values that fit a tensor: a scalar, or one value for each index of an axis."""
    shape = [-1 if index == axis else 1 for index in range(rank(x))] if axis is not None else []
    known = _constant(values)
    if known is not None:
        # OpenVINO looks for constants.
        return ops.constant(known.astype(np.float32).reshape(shape))
    return ops.reshape(ops.convert(values, "f32"), int64(shape), False)


def _quantized(
    x: Output, scale: Any, zero: Any, low: int, high: int, dtype: torch.dtype, axis: int | None, simulated: bool
) -> Any:
    x = ops.convert(x, "f32").output(0) if x.get_element_type() != ov.Type.f32 else x
    scales, zeros = _along(scale, x, axis), _along(zero, x, axis)
    known_scales, known_zeros = (_constant(node.output(0)) for node in (scales, zeros))
    # torch divides numbers in float64, and tensors in float32.
    inverse: Any = ops.divide(ops.constant(np.float32(1)), scales)
    if not isinstance(scale, Output):
        inverse = ops.constant(np.float32(1 / scale))
    elif known_scales is not None:
        inverse = ops.constant(np.float32(1) / known_scales)
    if known_scales is not None and known_zeros is not None:
        weight = _constant(x)
        if weight is not None:
            # OpenVINO would compute it, and then no longer know that it has 8 bits.
            levels = np.clip(np.round(weight * inverse.data) + known_zeros, low, high)
            return ops.constant(np.ascontiguousarray(levels.astype(_NUMPY[dtype])))
        if simulated:
            ends = [(np.float64(end) - known_zeros) * known_scales.astype(np.float64) for end in (low, high)]
            bounds = [ops.constant(np.asarray(bound, np.float32)) for bound in (*ends, low, high)]
            return ops.convert(ops.fake_quantize(x, *bounds, high - low + 1), _TYPES[dtype])
    rounded = ops.add(ops.round(ops.multiply(x, inverse), "half_to_even"), zeros)
    least, most = ops.constant(np.float32(low)), ops.constant(np.float32(high))
    return ops.convert(ops.minimum(ops.maximum(rounded, least), most), _TYPES[dtype])


def _dequantized(x: Output, scale: Any, zero: Any, dtype: torch.dtype | None, axis: int | None) -> Any:
    result = ops.convert(x, "f32")
    scales = _along(scale, x, axis)
    known = _constant(zero) if zero is not None else np.zeros(1)
    if known is None or known.any():
        result = ops.subtract(result, _along(zero, x, axis))
    result = ops.multiply(result, scales)
    return result if dtype in {None, torch.float32} else ops.convert(result, _FLOATS[dtype])


def _quantize_per_tensor(
    x: Output, scale: Any, zero: Any, low: int, high: int, dtype: torch.dtype, *, simulated: bool = False
) -> Any:
    """Returns ``clamp(round(x / scale) + zero, low, high)``, of any shape."""
    return _quantized(x, scale, zero, low, high, dtype, None, simulated)


def _quantize_per_channel(
    x: Output, scales: Output, zeros: Output, axis: int, low: int, high: int, dtype: torch.dtype,
    *, simulated: bool = False,
) -> Any:  # fmt: skip
    """As per tensor, with ``scales`` and ``zeros`` of ``[x.shape[axis]]``."""
    return _quantized(x, scales, zeros, low, high, dtype, axis % rank(x), simulated)


def _dequantize_per_tensor(
    x: Output, scale: Any, zero: Any, low: int, high: int, dtype: torch.dtype, *, out_dtype: torch.dtype | None = None
) -> Any:
    """Returns ``(x - zero) * scale``."""
    return _dequantized(x, scale, zero, out_dtype, None)


def _dequantize_per_channel(
    x: Output, scales: Output, zeros: Output | None, axis: int, low: int, high: int, dtype: torch.dtype,
    *, out_dtype: torch.dtype | None = None, wraps: bool = False,
) -> Any:  # fmt: skip
    """As per tensor, with ``scales`` and ``zeros`` of ``[x.shape[axis]]``.

    Raises:
        ValueError: torch subtracts the zero points in 8 bits, and they are not known to be zeros.
    """
    if wraps and ((known := _constant(zeros)) is None or known.any()):
        raise ValueError(
            "quantized_decomposed.dequantize_per_channel.default with 8-bit zero points other than 0, which torch "
            "subtracts in 8 bits"
        )
    return _dequantized(x, scales, zeros, out_dtype, axis % rank(x))


def _is_simulated(node: Node) -> dict[str, Any]:
    """Returns whether a node becomes FakeQuantize: its result is only dequantized, and the plugin has a kernel."""
    users = [user for user in node.users if user.users or user.op == "output"]
    only = bool(users) and all(op_name(user.target).startswith(_DEQUANTIZE) for user in users)
    return {"simulated": only and arguments_of(node).get("axis", 1) == 1}


def _limit_quantize(node: Node) -> str | None:
    arguments = arguments_of(node)
    if arguments["dtype"] not in _TYPES:
        return f"{op_name(node.target)} to {arguments['dtype']}: only int8 and uint8 are converted"
    return None


def _limit_dequantize(node: Node) -> str | None:
    arguments = arguments_of(node)
    if arguments["dtype"] not in {*_TYPES, torch.int32}:
        return f"{op_name(node.target)} from {arguments['dtype']}: only int8, uint8 and int32 are converted"
    if arguments.get("out_dtype") not in {None, torch.float32}:
        return f"{op_name(node.target)} to {arguments['out_dtype']}: torch rounds each step, OpenVINO the result"
    return None


def _wraps(node: Node) -> dict[str, Any]:
    """Returns whether torch subtracts the zero points in 8 bits, which only zeros come through unharmed."""
    arguments = arguments_of(node)
    zeros = arguments.get("zero_points")
    return {
        "wraps": isinstance(zeros, Node)
        and value_of(zeros).dtype is arguments["dtype"]
        and arguments["dtype"] in _TYPES
    }


def _with_float32_scale(operator: Any) -> Any:
    """Makes a decomposition that casts a float64 scale, as those that are computed from the input are."""

    def decompose(x: Tensor, scale: Tensor, zero: Tensor, *args: Any, **kwargs: Any) -> Any:
        if scale.dtype is not torch.float64:
            return NotImplemented
        return operator(x, scale.to(torch.float32), zero, *args, **kwargs)

    return decompose


def _choose(x: Tensor, low: int, high: int, eps: float, dtype: torch.dtype) -> Any:
    """Computes scale and zero point from the least and the largest value, as torch's `determine_qparams` does."""
    if x.dtype is not torch.float32:
        return NotImplemented
    least, most = (bound.reshape(1) for bound in torch.aminmax(x))
    least = least.clamp_max(0)
    scale = ((most.clamp_min(0) - least) / float(high - low)).clamp_min(eps)
    zero = (low - torch.round(least / scale)).clamp(low, high)
    return scale.to(torch.float64), zero.to(torch.int64)


def _choose_symmetric(x: Tensor, low: int, high: int, eps: float, dtype: torch.dtype) -> Any:
    """As `_choose`, with the zero point in the middle."""
    if x.dtype is not torch.float32:
        return NotImplemented
    least, most = (bound.reshape(1) for bound in torch.aminmax(x))
    scale = (torch.maximum(-least.clamp_max(0), most.clamp_min(0)) / (float(high - low) / 2)).clamp_min(eps)
    zero = torch.full((1,), 128 if dtype is torch.uint8 else 0, dtype=torch.int64)
    return scale.to(torch.float64), zero


declare(
    Rule(convert=_quantize_per_tensor, facts=_is_simulated, limit=_limit_quantize, saturates=True),
    _PACKETS.quantize_per_tensor.default,
    _PACKETS.quantize_per_tensor.tensor,
)
declare(
    Rule(convert=_quantize_per_channel, facts=_is_simulated, limit=_limit_quantize, saturates=True),
    _PACKETS.quantize_per_channel.default,
)
declare(
    Rule(convert=_dequantize_per_tensor, limit=_limit_dequantize),
    _PACKETS.dequantize_per_tensor.default,
    _PACKETS.dequantize_per_tensor.tensor,
)
declare(
    Rule(convert=_dequantize_per_channel, facts=_wraps, limit=_limit_dequantize),
    _PACKETS.dequantize_per_channel.default,
)
declare(Rule(decompose=_choose), _PACKETS.choose_qparams.tensor)
declare(Rule(decompose=_choose_symmetric), _PACKETS.choose_qparams_symmetric.tensor)
for _packet in (_PACKETS.quantize_per_tensor, _PACKETS.dequantize_per_tensor):
    declare(Rule(decompose=_with_float32_scale(_packet.tensor)), _packet.tensor)
