"""The remainder of a division, as exact as C's fmod; OpenVINO's Mod rounds the quotient to a float first.

Long division with digits of 11 bits, in a Loop that runs as often as the largest quotient needs. With ``|y| 2^(11 k)``
split into two halves of 12 bits (Dekker, "A floating-point technique for extending the available precision", 1971)
each product of a digit with a half is exact, and so are the differences: all are multiples of the divisor's last bit
and smaller than twice the divisor. No result depends on whether a multiplication and an addition are fused.
"""

from typing import Any

import numpy as np
import openvino as ov
from openvino import Output, Type
from openvino import opset15 as ops

_DIGIT = 11
# 2^(11 k) as a product of two factors, since the larger ones exceed float32.
_PLACES = 26
_LOW = np.array([2.0 ** min(_DIGIT * k, 121) for k in range(_PLACES)], np.float32)
_HIGH = np.array([2.0 ** max(0, min(_DIGIT * k - 121, 127)) for k in range(_PLACES)], np.float32)
_SPLITTER = np.float32(4097.0)
# Dividends above _HUGE and divisors above _LARGE are divided by _SCALE, a power of 2, so that nothing is lost.
_HUGE, _LARGE, _SCALE = 2.0**100, 2.0**64, 2.0**24


def _f(value: float) -> Any:
    return ops.constant(np.float32(value))


def exact_fmod(x: Output, y: Output) -> ov.Node:
    """Computes ``x - trunc(x / y) * y`` for floats of one type without any rounding, with the sign of ``x``."""
    kind = x.get_element_type()
    shape = ops.constant(np.array(np.broadcast_shapes(tuple(x.get_shape()), tuple(y.get_shape())), np.int64))
    dividend, divisor = (ops.broadcast(ops.convert(operand, "f32"), shape) for operand in (x, y))
    # OpenVINO drops the abs of values that it can compute while it compiles (tests/contract pins it).
    a, b = (ops.maximum(operand, ops.negative(operand)) for operand in (dividend, divisor))
    rest = ops.select(ops.less(a, b), a, _positive_rest(a, b))
    signed = ops.select(ops.less(dividend, _f(0)), ops.negative(rest), rest)
    undefined = ops.logical_or(ops.equal(b, _f(0)), ops.logical_not(ops.less(a, _f(np.inf))))
    undefined = ops.logical_or(undefined, ops.is_nan(b))
    return ops.convert(ops.select(undefined, _f(np.nan), signed), kind.get_type_name())


def _positive_rest(a: ov.Node, b: ov.Node) -> ov.Node:
    """Computes the remainder of non-negative numbers; very large ones, whose multiples overflow, are scaled down."""
    large, huge = ops.greater(b, _f(_LARGE)), ops.greater(a, _f(_HUGE))
    both = ops.logical_or(large, huge)
    less_b = ops.select(large, ops.multiply(b, _f(1 / _SCALE)), b)
    rest = _reduce(ops.select(both, ops.multiply(a, _f(1 / _SCALE)), a), less_b)
    back = ops.multiply(rest, _f(_SCALE))
    # For a huge a and a b that is not large, the rest of a 2^-24, scaled back and reduced again, is that of a.
    only_huge = ops.logical_and(huge, ops.logical_not(large))
    again = _reduce(ops.select(only_huge, back, _f(0)), less_b)
    return ops.select(large, back, ops.select(huge, again, rest))


def _iterations(a: ov.Node, b: ov.Node) -> ov.Node:
    """Returns the digits of the largest quotient, plus one as the logarithm is rounded; 0 if none reaches 1."""
    length = ops.subtract(ops.log(a), ops.log(b))
    regular = ops.logical_and(ops.greater(length, _f(0)), ops.less(length, _f(200)))
    every = ops.constant(np.arange(len(a.get_output_shape(0)), dtype=np.int64))
    longest = ops.reduce_max(ops.select(regular, length, _f(0)), every, False)
    digits = ops.add(ops.floor(ops.multiply(longest, _f(1 / (_DIGIT * np.log(2))))), _f(2))
    needed = ops.reduce_logical_or(ops.greater_equal(a, b), every, False)
    return ops.convert(ops.select(needed, ops.minimum(digits, _f(_PLACES)), _f(0)), "i64")


def _reduce(a: ov.Node, b: ov.Node) -> ov.Node:
    """Returns ``a`` minus a multiple of ``b``, between 0 and ``b``."""
    big = ops.multiply(b, ops.constant(_SPLITTER))
    high = ops.subtract(big, ops.subtract(big, b))
    low = ops.subtract(b, high)

    shape = list(a.get_output_shape(0))
    rest, whole, upper, lower = (ops.parameter(shape, Type.f32) for _ in range(4))
    step = ops.parameter([], Type.i64)
    zero = ops.constant(np.int64(0))
    scale = [ops.gather(ops.constant(table), step, zero) for table in (_LOW, _HIGH)]
    top, above, below = (ops.multiply(ops.multiply(value, scale[0]), scale[1]) for value in (whole, upper, lower))
    digit = ops.floor(ops.add(ops.divide(rest, top), _f(0.5)))
    left = ops.subtract(ops.subtract(rest, ops.multiply(digit, above)), ops.multiply(digit, below))
    smaller = ops.select(ops.less(ops.abs(rest), top), rest, left)
    following = ops.subtract(step, ops.constant(np.int64(1)))
    go_on = ops.constant(np.array(True))
    body = ov.Model([go_on, smaller, following], [rest, step, whole, upper, lower])

    count = _iterations(a, b)
    loop = ops.loop(count, ops.constant(np.array(True)))
    loop.set_function(body)
    loop.set_special_body_ports([-1, 0])
    loop.set_merged_input(rest, a.output(0), smaller.output(0))
    loop.set_merged_input(step, ops.subtract(count, ops.constant(np.int64(1))).output(0), following.output(0))
    for parameter, value in ((whole, b), (upper, high), (lower, low)):
        loop.set_invariant_input(parameter, value.output(0))
    least = loop.get_iter_value(smaller.output(0), -1)
    return ops.select(ops.less(least, _f(0)), ops.add(least, b), least)
