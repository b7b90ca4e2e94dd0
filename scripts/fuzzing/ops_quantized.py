"""Layers in 8 bits, as quantizers write them: quantized values and weights, dequantized before each operator.

Quantization turns a rounding error before it into a whole step, so it only takes values without any: multiples of 1/64.
Scales are odd multiples of that: no quotient lies halfway between two integers, where OpenVINO may round the other way.
"""

from __future__ import annotations

import torch

from fuzzing.context import Context
from fuzzing.draft import Draft, Val
from fuzzing.registry import at_least, exact, op

_OPS = "torch.ops.quantized_decomposed"
# How a result is used: OpenVINO moves scales behind some operators, and copies them for several users.
_FORMS = ("Y",) * 5 + (
    "torch.relu(Y)",
    "(y := Y) + y.flip(0)",
    "(y := Y * -2.5) + y.flip(-1)",
    "(y := Y) * y.sigmoid()",
)


def _value(g: Context, least: int = 1) -> Val:
    return g.take(exact, at_least(least), lambda v: v.dtype is torch.float32 and v.tensor.numel() > 0)


def _bytes(g: Context) -> str:
    """Zero point and range."""
    signed = g.chance(0.6)
    zero = g.choice([0, 0, 3, 100] if signed else [128, 128, 3, 100])
    return f"{zero}, -128, 127, torch.int8" if signed else f"{zero}, 0, 255, torch.uint8"


def _dequantized(g: Context, value: str) -> str:
    """With one scale."""
    how = f"{g.choice([3, 5, 7])} / 64, {_bytes(g)}"
    return f"{_OPS}.dequantize_per_tensor({_OPS}.quantize_per_tensor({value}, {how}), {how})"


def _constant(g: Context, code: str) -> str:
    """A buffer that nothing writes to, named like a parameter."""
    return g.attribute("p", f'self.register_buffer("NAME", {code})')


def _weight(g: Context, *shape: int) -> tuple[str, tuple[str, ...]]:
    """A weight in 8 bits with a scale for each index of its first dimension, and the buffers that it is made of."""
    sizes = ", ".join(map(str, shape))
    weight = _constant(g, f"torch.randint(-127, 128, ({sizes},), dtype=torch.int8)")
    scales = _constant(g, f"(torch.rand({shape[0]}) + 0.5) / 256")
    zeros = f"torch.zeros({shape[0]}, dtype=torch.int64)"
    code = f"{_OPS}.dequantize_per_channel(self.{weight}, self.{scales}, {zeros}, 0, -128, 127, torch.int8)"
    return code, (weight, scales)


def _bias(g: Context, size: int) -> tuple[str, tuple[str, ...]]:
    if g.chance(0.5):
        return "None", ()
    name = g.attribute("p", f"torch.nn.Parameter(torch.randn({size}))")
    return f"self.{name}", (name,)


@op(2.0)
def quantized(g: Context) -> Draft:
    return Draft(_dequantized(g, "{0}"), [_value(g)], exact="arith")


@op(1.0)
def quantized_per_channel(g: Context) -> Draft:
    value = _value(g)
    axis = g.integer(0, value.dim - 1)
    scales = _constant(g, f"(torch.randint(1, 4, ({value.shape[axis]},)) * 2 + 1) / 64")
    zeros = _constant(g, f"torch.randint(-20, 20, ({value.shape[axis]},))")
    how = f"self.{scales}, self.{zeros}, {axis}, -128, 127, torch.int8"
    code = f"{_OPS}.dequantize_per_channel({_OPS}.quantize_per_channel({{0}}, {how}), {how})"
    return Draft(code, [value], exact="arith", uses=(scales, zeros))


@op(2.0)
def quantized_linear(g: Context) -> Draft:
    value = _value(g)
    out = g.choice([1, 3, value.shape[-1]])
    weight, uses = _weight(g, out, value.shape[-1])
    bias, more = _bias(g, out)
    code = f"F.linear({_dequantized(g, '{0}')}, {weight}, {bias})"
    return Draft(g.choice(_FORMS).replace("Y", code), [value], uses=uses + more)


@op(5.0)
def quantized_conv(g: Context) -> Draft:
    value = g.take(exact, lambda v: v.dtype is torch.float32 and v.dim in (3, 4) and v.tensor.numel() > 0)
    channels, rank = value.shape[1], value.dim - 2
    size, how = g.choice([(1, ""), (3, ", padding=1"), (3, ", padding=1"), (3, ", padding=1, stride=2")])
    out, deep, kind = g.choice([2, channels]), channels, "conv"
    if g.chance(0.2):
        out, deep, how = channels, 1, f"{how}, groups={channels}"
    elif g.chance(0.2):
        out, deep, kind = channels, out, "conv_transpose"
    weight, uses = _weight(g, out, deep, *[size] * rank)
    bias, more = _bias(g, deep if kind == "conv_transpose" else out)
    code = f"F.{kind}{rank}d({_dequantized(g, '{0}')}, {weight}, {bias}{how})"
    return Draft(g.choice(_FORMS).replace("Y", code), [value], uses=uses + more)


@op(1.0)
def quantized_product(g: Context) -> Draft:
    value = _value(g, 2)
    code = f"{_dequantized(g, '{0}')} @ {_dequantized(g, '{0}')}.transpose(-1, -2)"
    return Draft(g.choice(_FORMS).replace("Y", f"({code})"), [value])
