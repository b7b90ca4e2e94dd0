"""Quantized tensors: floats to 8-bit integers and back, against eager PyTorch.

Integers are equal. Where a quantization is only dequantized, OpenVINO rounds by the arithmetic of its FakeQuantize, so
that a value halfway between two integers may become either of them.
"""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

import torchserve_openvino as tov
from helpers import check

Q = torch.ops.quantized_decomposed
RANGES = {torch.uint8: [(0, 255), (0, 127), (0, 15)], torch.int8: [(-128, 127), (-127, 127), (-8, 7)]}
EXTREMES = [float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e-40, 0.0, -0.0]
SCALES = [1.0, 0.5, 0.1, 1 / 3, 0.017, 1e-8, 1e8]
FORMS = ["quantized", "both ways", "both and between", "dequantized", "moved between"]


class Quantizer(nn.Module):
    """Quantizes and dequantizes by one scale, or by one for each index of an axis."""

    def __init__(self, form: str, dtype: torch.dtype, ends: tuple[int, int], scale: Any, zero: Any, axis: int | None):
        super().__init__()
        self.form, self.axis, self.last = form, axis, (*ends, dtype)
        if axis is not None:
            scale, zero = nn.Buffer(torch.tensor(scale)), nn.Buffer(torch.tensor(zero))
        self.scale, self.zero = scale, zero

    def given(self) -> tuple[Any, ...]:
        return (self.scale, self.zero, *(() if self.axis is None else (self.axis,)), *self.last)

    def there(self, x: Tensor) -> Tensor:
        return (Q.quantize_per_tensor if self.axis is None else Q.quantize_per_channel)(x, *self.given())

    def back(self, x: Tensor) -> Tensor:
        return (Q.dequantize_per_tensor if self.axis is None else Q.dequantize_per_channel)(x, *self.given())

    def forward(self, x: Tensor) -> Any:
        match self.form:
            case "quantized":
                return self.there(x)
            case "both ways":
                return self.back(self.there(x))
            case "both and between":
                found = self.there(x)
                return found, self.back(found)
            case "dequantized":
                return self.back(x)
            case _:
                return self.back(self.there(x).flip(0))


def same(got: Tensor, expected: Tensor, step: Tensor, halfway: Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if not expected.is_floating_point():
        assert torch.equal(got, expected)
        return
    difference = (got.double() - expected.double()).abs()
    # OpenVINO may multiply before it subtracts, which rounds otherwise.
    assert bool((difference <= step * (256e-6 + 1.01 * halfway)).all()), difference.max()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_quantization(data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from(list(RANGES)))
    low, high = ends = draw(st.sampled_from(RANGES[dtype]))
    axis = draw(st.sampled_from([None, None, 0, 1, 2, -1]))
    shape = draw(st.sampled_from([(3, 4, 5), (2, 3, 4, 6), (1, 2, 3)]))
    count = 1 if axis is None else shape[axis]
    scales = draw(st.lists(st.sampled_from(SCALES), min_size=count, max_size=count))
    zeros = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
    form = draw(st.sampled_from(FORMS))
    model = Quantizer(
        form, dtype, ends, scales[0] if axis is None else scales, zeros[0] if axis is None else zeros, axis
    ).eval()
    compiled = tov.compile(model, dynamic=draw(st.booleans()))
    places = [1] * len(shape)
    if axis is not None:
        places[axis] = count
    step = torch.tensor(scales, dtype=torch.float64).reshape(places)
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    for spread in (30, 300):
        if form == "dequantized":
            x = torch.randint(low, high + 1, shape, generator=noise, dtype=dtype)
            halfway = torch.zeros(shape, dtype=torch.bool)
        else:
            x = (torch.randn(shape, generator=noise) * step * spread).float()
            which = torch.randperm(x.numel(), generator=noise)[: len(EXTREMES)]
            x.view(-1)[which] = torch.tensor(EXTREMES)[: len(which)]
            halfway = ((x.double() / step) % 1 - 0.5).abs() < 1e-4
        halfway = halfway.flip(0) if form == "moved between" else halfway
        with torch.no_grad():
            expected, got = model(x), compiled(x)
        for mine, theirs in zip(
            *((each if isinstance(each, tuple) else (each,)) for each in (got, expected)), strict=True
        ):
            same(mine, theirs, step, halfway)
    assert compiled.report.summary.coverage == 1.0 and compiled.report.fallbacks == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_quantized_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(3, 40).to(dtype)
    check(lambda x: Q.quantize_per_tensor(x, 0.03, 3, -128, 127, torch.int8), x)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("dynamic", [False, True])
def test_scales_that_are_computed(symmetric: bool, dtype: torch.dtype, dynamic: bool) -> None:
    choose = Q.choose_qparams_symmetric.tensor if symmetric else Q.choose_qparams.tensor
    low, high = (0, 255) if dtype is torch.uint8 else (-128, 127)

    def model(x: Tensor) -> Tensor:
        scale, zero = choose(x, low, high, 1e-8, dtype)
        found = Q.quantize_per_tensor.tensor(x, scale, zero, low, high, dtype)
        return Q.dequantize_per_tensor.tensor(found, scale, zero, low, high, dtype) + 1

    compiled = tov.compile(model, dynamic=dynamic)
    for x in (torch.randn(4, 9), torch.rand(4, 9) + 3, -torch.rand(4, 9), torch.zeros(4, 9), torch.randn(4, 9) * 1e20):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert compiled.report.summary.coverage == 1.0 and compiled.report.summary.partitions == 1
    assert compiled.report.fallbacks == []


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: Q.dequantize_per_channel(x.to(torch.int8), x[0], x[0].to(torch.int8), 1, -128, 127, torch.int8),
         "8-bit zero points"),
        (lambda x: Q.quantize_per_tensor(x, 0.1, 0, -32768, 32767, torch.int32), "only int8 and uint8"),
        (lambda x: Q.dequantize_per_tensor(x.to(torch.int8), 0.1, 0, -128, 127, torch.int8, out_dtype=torch.bfloat16),
         "rounds each step"),
    ],
)  # fmt: skip
def test_what_stays_in_eager_says_why(call: Any, reason: str) -> None:
    compiled = tov.compile(call)
    x = torch.randn(3, 4) * 50
    torch.testing.assert_close(compiled(x), call(x))
    assert any(reason in each.reason for each in compiled.report.fallbacks), compiled.report.fallbacks


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_zero_points_of_8_bits(dtype: torch.dtype) -> None:
    """torch subtracts them in 8 bits: zeros are harmless, others wrap around."""
    low, high = (0, 255) if dtype is torch.uint8 else (-128, 127)

    class Channels(nn.Module):
        def __init__(self, zeros: list[int]) -> None:
            super().__init__()
            self.register_buffer("scales", torch.rand(3) * 0.05 + 0.01)
            self.register_buffer("zeros", torch.tensor(zeros, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            x = Q.quantize_per_channel(x, self.scales, self.zeros, 1, low, high, dtype)
            return Q.dequantize_per_channel(x, self.scales, self.zeros, 1, low, high, dtype).relu()

    for zeros, partitions in (([0, 0, 0], 1), ([0, 100, 0], None)):
        model = Channels(zeros)
        compiled = tov.compile(model)
        for _ in range(2):
            x = torch.randn(2, 3, 4, 4) * 3
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=0.07 if partitions else 1e-5)
        assert bool(compiled.report.fallbacks) is (partitions is None)
        if partitions:
            assert compiled.report.summary.coverage == 1.0
