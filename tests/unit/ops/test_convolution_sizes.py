"""Convolutions of any size in bfloat16 and in 8 bits, whose kernels OpenVINO chooses by their sizes."""

import warnings

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import torchserve_openvino as tov
from helpers import check

BF16 = {"min_partition_us": 0, "config": {"INFERENCE_PRECISION_HINT": "bf16"}}
# Type, channels, results, kernel, stride, padding, and the sizes of the input.
CASES = {
    "patches in one column": (nn.Conv2d, 48, 64, 4, 4, 0, (40, 6)),
    "an image of one column": (nn.Conv2d, 64, 16, (7, 3), (2, 2), (3, 0), (37, 4)),
    "patches of few channels": (nn.Conv2d, 24, 32, 8, 8, 0, (16, 24)),
    "windows of samples": (nn.Conv1d, 8, 64, 16, 2, 8, (500,)),
    "voxels": (nn.Conv3d, 16, 32, 4, (1, 1, 4), 0, (5, 12, 12)),
    "one column of voxels": (nn.Conv3d, 40, 24, 4, (4, 2, 4), (0, 1, 0), (20, 9, 4)),
}


def relative_difference(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("batch", [2, 33])
@pytest.mark.parametrize("name", CASES)
def test_in_bfloat16(name: str, batch: int) -> None:
    kind, channels, results, kernel, stride, padding, sizes = CASES[name]
    torch.manual_seed(0)
    model = nn.Sequential(kind(channels, results, kernel, stride, padding), nn.ReLU()).eval()
    compiled = tov.compile(model, options=BF16)
    for _ in range(2):
        x = torch.randn(batch, channels, *sizes)
        with torch.no_grad():
            assert relative_difference(compiled(x), model(x)) < 0.02
    assert compiled.report.summary.coverage == 1.0
    check(model, torch.randn(batch, channels, *sizes))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_any_in_bfloat16(data: st.DataObject) -> None:
    sizes = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12, 16, 32])
    kernel = [data.draw(sizes), data.draw(sizes)]
    stride = [data.draw(st.sampled_from([size, 1, 2, 4])) for size in kernel]
    padding = [data.draw(st.sampled_from([0, 1, size // 2])) for size in kernel]
    dilation = [data.draw(st.sampled_from([1, 1, 2])) for _ in kernel]
    groups = data.draw(st.sampled_from([1, 1, 2]))
    channels = groups * data.draw(st.sampled_from([1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 48, 64]))
    results = groups * data.draw(st.sampled_from([1, 7, 16, 24, 32]))
    more = [data.draw(st.sampled_from([0, 1, 5, 8, 16])) for _ in kernel]
    spans = [(size - 1) * step + 1 + extra for size, step, extra in zip(kernel, dilation, more, strict=True)]
    batch = data.draw(st.sampled_from([1, 2, 8, 33]))
    torch.manual_seed(0)
    model = nn.Conv2d(channels, results, kernel, stride, padding, dilation, groups).eval()
    torch._dynamo.reset()
    x = torch.randn(batch, channels, *spans)
    with torch.no_grad():
        assert relative_difference(tov.compile(model, options=BF16)(x), model(x)) < 0.03


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "sizes"),
    [(8, (4, 16), (1, 16), (40, 17)), (32, 16, (2, 4), (24, 24)), (12, (4, 16), 4, (17, 32))],
    ids=["one column", "full blocks", "few channels"],
)
def test_in_8_bits(
    channels: int, kernel: tuple[int, int] | int, stride: tuple[int, int] | int, sizes: tuple, monkeypatch
) -> None:
    from torch.ao.quantization import QConfigMapping, get_default_qconfig
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    # torch's other engine computes these as wrongly as OpenVINO (tests/contract/test_openvino_convolutions.py).
    monkeypatch.setattr(torch.backends.quantized, "engine", "fbgemm")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(channels, 24, kernel, stride), nn.ReLU()).eval()
    x = torch.randn(8, channels, *sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(model, QConfigMapping().set_global(get_default_qconfig("x86")), (x,))
        prepared(x)
        quantized = convert_fx(prepared)
    compiled = tov.compile(quantized, options={"min_partition_us": 0})
    with torch.no_grad():
        assert relative_difference(compiled(x), quantized(x)) < 0.02
    assert compiled.report.summary.coverage == 1.0
