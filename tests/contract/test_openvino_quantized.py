"""Pins defects of OpenVINO 2026.4 with 8-bit values: why `passes/ov/kernel_fusions.py` separates kernels."""

from collections.abc import Callable
from functools import partial

import numpy as np
import openvino as ov
import pytest
from openvino import opset15 as ops

from torchserve_openvino.backend.runtime.build import cpu_level
from torchserve_openvino.passes.ov.rectified_convolutions import clamp_rectified
from torchserve_openvino.passes.pass_context import PassContext

CORE = ov.Core()
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
UNFUSED = {"SNIPPETS_MODE": "DISABLE"}
SCALE, ZERO = np.float32(0.05), np.float32(3)


def dequantized(value: ov.Node, zero: np.float32 = ZERO) -> ov.Node:
    """As the conversion of this package writes quantization to 8 bits, and back."""
    ends = [ops.constant(np.float32(end)) for end in ((-128 - zero) * SCALE, (127 - zero) * SCALE, -128, 127)]
    integers = ops.convert(ops.fake_quantize(value, *ends, 256), "i8")
    shifted = ops.subtract(ops.convert(integers, "f32"), ops.constant(zero))
    return ops.multiply(shifted, ops.constant(SCALE))


def convolved(value: ov.Node, zero: np.float32 = ZERO) -> ov.Node:
    """A convolution in 8 bits with two channels."""
    weight = ops.convert(ops.constant(np.array([[[5], [7]], [[-11], [13]]], dtype=np.int8)), "f32")
    scaled = ops.multiply(weight, ops.constant(np.array([[[0.01]], [[0.02]]], dtype=np.float32)))
    return ops.convolution(dequantized(value, zero), scaled, [1], [0], [0], [1])


def added_to_its_reverse(value: ov.Output) -> ov.Node:
    start, stop, step = (ops.constant(np.array([each])) for each in (-1, -(2**31), -1))
    return ops.add(value, ops.slice(value, start, stop, step, ops.constant(np.array([0]))))


def run(build: Callable[[ov.Node], ov.Node], x: np.ndarray, symbolic: bool = False, **config: str) -> np.ndarray:
    parameter = ops.parameter(ov.PartialShape([-1, *x.shape[1:]] if symbolic else list(x.shape)), ov.Type.f32)
    compiled = CORE.compile_model(ov.Model([build(parameter)], [parameter]), "CPU", {**F32, **config})
    return compiled([x])[0]


X = (np.arange(24, dtype=np.float32).reshape(3, 2, 4) - 9) * SCALE


@pytest.mark.parametrize(
    ("how", "twice"), [({}, False), ({"symbolic": True}, True), (UNFUSED, True)], ids=["static", "symbolic", "unfused"]
)
def test_a_convolution_with_two_users_is_scaled_twice(how, twice) -> None:
    """A maximum in between, of the value with itself, prevents it; the kernels for AMX do not have the fault."""
    twice = twice and "AMX" not in cpu_level()
    once = run(convolved, X)
    expected = once + once[::-1]
    got = run(lambda p: added_to_its_reverse(convolved(p).output(0)), X, **how)
    kept = run(lambda p: added_to_its_reverse(ops.maximum(both := convolved(p), both).output(0)), X, **how)
    assert np.allclose(got, expected, atol=1e-5) is not twice
    # The scale of the values times that of the weights.
    factor = np.array([[0.01], [0.02]]) * SCALE
    assert np.allclose(got, expected * (factor if twice else 1), atol=1e-5)
    assert np.allclose(kept, expected, atol=1e-5)


PADDED = np.pad(X, [(0, 0), (0, 0), (1, 1)])
ONE = np.ones((1, 1, 1), dtype=np.float32)
CHANNELS = np.array([[[1], [10]]], dtype=np.float32)


@pytest.mark.parametrize(
    ("numbers", "after", "expected"),
    [
        (ONE, lambda value: ops.clamp(value, -0.127, 0.223), X.clip(-0.127, 0.223)),
        (ONE, lambda value: ops.avg_pool(value, [1], [1], [1], [2], False), (PADDED[..., 1:] + PADDED[..., :-1]) / 2),
        (CHANNELS, lambda value: ops.reduce_mean(value, ops.constant(np.array([2])), False), (X * CHANNELS).mean(2)),
    ],
    ids=["clamps between integers", "pads with 0, not the zero point", "reduces, and scales by other numbers"],
)
def test_an_operator_is_moved_to_the_integers(numbers, after, expected) -> None:
    """A maximum in between, of the value with itself, prevents it."""

    def scaled(value: ov.Node) -> ov.Node:
        return ops.multiply(dequantized(value), ops.constant(numbers))

    assert not np.allclose(run(lambda p: after(scaled(p)), X), expected, atol=1e-3)
    assert np.allclose(run(lambda p: after(ops.maximum(both := scaled(p), both)), X), expected, atol=1e-5)


def rectified(value: ov.Node, slope: float) -> ov.Node:
    return ops.relu(value) if not slope else ops.prelu(value, ops.constant(np.array([slope], dtype=np.float32)))


@pytest.mark.parametrize("slope", [0.0, 0.1], ids=["relu", "leaky"])
@pytest.mark.parametrize(
    "scaled",
    [
        lambda value: ops.multiply(value, ops.constant(np.array([[[-1], [2]]], dtype=np.float32))),
        ops.negative,
    ],
    ids=["numbers of both signs", "negative"],
)
@pytest.mark.parametrize("symbolic", [False, True])
def test_a_scale_is_moved_in_front_of_a_relu_whatever_its_sign(slope, scaled, symbolic) -> None:
    """`clamp_rectified` clamps instead, which is not moved. Nor is a scale where the kernel has a zero point to add."""
    symmetric = partial(convolved, zero=np.float32(0))
    parameter = ops.parameter(ov.PartialShape([-1, *X.shape[1:]] if symbolic else list(X.shape)), ov.Type.f32)
    faulty = ov.Model([scaled(rectified(symmetric(parameter), slope))], [parameter])
    cured = faulty.clone()
    clamp_rectified(cured, PassContext())
    once = run(symmetric, X)
    other = ops.parameter(list(X.shape), ov.Type.f32)
    follows = CORE.compile_model(ov.Model([scaled(other)], [other]), "CPU", F32)
    (expected,) = follows([np.where(once > 0, once, slope * once)]).values()
    got, right = (next(iter(CORE.compile_model(each, "CPU", F32)([X]).values())) for each in (faulty, cured))
    assert not np.allclose(got, expected, atol=1e-3)
    assert np.allclose(right, expected, atol=1e-5)
