"""Pins the convolutions that oneDNN's kernels for AMX compute wrongly; the cures are right."""

import numpy as np
import openvino as ov
import pytest
import torch
from openvino import opset15 as ops

from torchserve_openvino.passes.ov.convolution_kernels import widen_kernels
from torchserve_openvino.passes.pass_context import PassContext

CORE = ov.Core()

# Batch, channels, results, kernel, strides, padding, sizes.
ONE_COLUMN = (8, 48, 64, (4, 4), (4, 4), (0, 0), (40, 6))
FULL_BLOCKS = (33, 24, 32, (8, 8), (8, 8), (0, 0), (16, 24))
ONE_COLUMN_OF_BYTES = (1, 8, 48, (32, 32), (1, 32), (16, 0), (79, 32))
ONE_COLUMN_AND_A_REST_OF_BYTES = (1, 8, 48, (32, 32), (1, 32), (16, 0), (79, 40))
FULL_BLOCKS_OF_BYTES = (8, 32, 24, (16, 16), (2, 4), (0, 0), (24, 24))


def convolution(batch, channels, results, kernel, strides, padding, sizes, *, in_bytes=False) -> tuple:
    """Returns a model, its input and the right result."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, channels, *sizes)).astype(np.float32)
    weights = rng.standard_normal((results, channels, *kernel)).astype(np.float32)
    weights /= np.float32(np.sqrt(channels * np.prod(kernel)))
    parameter = ops.parameter(x.shape, np.float32)
    value, constant = parameter.output(0), ops.constant(weights).output(0)
    if in_bytes:
        x = np.clip(np.round(x * 20), -128, 127).astype(np.float32) / 20
        scale = np.float32(np.abs(weights).max() / 127)
        integers = np.round(weights / scale)
        weights = (integers * scale).astype(np.float32)
        bounds = [ops.constant(np.float32(bound / 20)) for bound in (-128, 127)]
        value = ops.fake_quantize(parameter, *bounds, *bounds, 256).output(0)
        floats = ops.convert(ops.constant(integers.astype(np.int8)), np.float32)
        constant = ops.multiply(floats, ops.constant(scale)).output(0)
    result = ops.convolution(value, constant, strides, padding, padding, [1] * len(kernel))
    expected = torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(weights), None, strides, padding)
    return ov.Model([result], [parameter]), x, expected.numpy()


def error(model: ov.Model, x: np.ndarray, expected: np.ndarray, hint: str) -> tuple[float, str]:
    """Returns the largest difference, relative to the largest value, and the name of the kernel."""
    compiled = CORE.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": hint})
    infos = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    (kernel,) = [
        info["primitiveType"].astype(str)
        for info in infos
        if "layerType" in info and info["layerType"].astype(str) == "Convolution"
    ]
    return float(np.abs(compiled(x)[0] - expected).max() / np.abs(expected).max()), kernel


@pytest.mark.parametrize(
    ("case", "in_bytes"),
    [
        (ONE_COLUMN, False),
        (ONE_COLUMN_OF_BYTES, True),
        (ONE_COLUMN_AND_A_REST_OF_BYTES, True),
        (FULL_BLOCKS, False),
        (FULL_BLOCKS_OF_BYTES, True),
    ],
    ids=[
        "one column",
        "one column in 8 bits",
        "one column and a rest in 8 bits",
        "full blocks",
        "full blocks in 8 bits",
    ],
)
def test_kernels_for_amx_are_wrong_and_wider_ones_right(case: tuple, in_bytes: bool) -> None:
    model, x, expected = convolution(*case, in_bytes=in_bytes)
    hint = "f32" if in_bytes else "bf16"
    wrong, kernel = error(model, x, expected, hint)
    if "amx" in kernel:
        assert wrong > 0.1, "OpenVINO computes it rightly: passes/ov/convolution_kernels.py can go"
    widen_kernels(model, PassContext())
    right, kernel = error(model, x, expected, hint)
    assert right < 0.02
    assert kernel.endswith("i8" if in_bytes else "bf16") or "amx" not in kernel


def test_what_no_kernel_reads_changes_nothing() -> None:
    model, x, expected = convolution(*ONE_COLUMN)
    x[..., 4:] = np.inf
    widen_kernels(model, PassContext())
    assert error(model, x, expected, "f32")[0] < 1e-5


def test_eager_pytorch_is_wrong_in_bfloat16_too() -> None:
    """Why a model in bfloat16 with such a convolution is not served: READY compares with eager PyTorch."""
    batch, channels, results, kernel, strides, _, sizes = FULL_BLOCKS
    torch.manual_seed(0)
    layer, x = torch.nn.Conv2d(channels, results, kernel, strides), torch.randn(batch, channels, *sizes)
    with torch.no_grad():
        exact = layer(x)
        difference = (layer.bfloat16()(x.bfloat16()).float() - exact).abs().max() / exact.abs().max()
    if torch.cpu._is_amx_tile_supported():
        assert difference > 0.1, "torch computes it rightly: docs/limits.md says otherwise"
    else:
        assert difference < 0.02
