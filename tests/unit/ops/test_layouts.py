"""Outputs have eager's memory layout for transposed and channels-last inputs."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchserve_openvino as tov
from helpers import assert_same, check

OPTIONS = {"min_partition_us": 0}
TURNED = torch.randn(4, 2, 6).transpose(0, 1)
IMAGE = torch.randn(2, 4, 4, 4)
LAST = IMAGE.to(memory_format=torch.channels_last)
CASES = {
    "batch norm of two dimensions": (nn.BatchNorm1d(4), torch.randn(4, 3).T),
    "batch norm of three": (nn.BatchNorm1d(4), TURNED),
    "batch norm of four": (nn.BatchNorm2d(4), IMAGE.transpose(2, 3)),
    "batch norm, channels last": (nn.BatchNorm2d(4), LAST),
    "batch norm by its own statistics": (nn.BatchNorm1d(4, track_running_stats=False), TURNED),
    "group norm": (nn.GroupNorm(2, 4), TURNED),
    "group norm, channels last": (nn.GroupNorm(2, 4), LAST),
    "layer norm": (nn.LayerNorm(6), TURNED),
    "rms norm": (nn.RMSNorm(6), TURNED),
    "linear": (nn.Linear(6, 3), TURNED),
    "convolution": (nn.Conv1d(4, 3, 2), TURNED),
    "convolution, channels last": (nn.Conv2d(4, 3, 2), LAST),
    "transposed convolution, channels last": (nn.ConvTranspose2d(4, 3, 2), LAST),
    "pooling, channels last": (nn.MaxPool2d(2), LAST),
    "adaptive pooling, channels last": (nn.AdaptiveAvgPool2d(2), LAST),
    "log-sigmoid": (nn.LogSigmoid(), TURNED),
    "softmax": (nn.Softmax(-1), TURNED),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), torch.randn(2, 5, 3, 4).transpose(1, 2)),
    "sort": (lambda x: x.sort(0)[0], TURNED),
    "cumsum": (lambda x: x.cumsum(0), TURNED),
    "variance": (lambda x: x.var(1, keepdim=True), TURNED),
    "maximum": (lambda x: x.max(-1)[0], TURNED),
    "roll": (lambda x: x.roll(1, 0), TURNED),
    "stack": (lambda x: torch.stack([x, x], 0), TURNED),
    "pad": (lambda x: F.pad(x, (1, 1)), TURNED),
    "where": (lambda x: torch.where(x > 0, x, 1), TURNED),
    "norm over a single one": (lambda x: torch.linalg.vector_norm(x.T[:, :, None], math.inf, dim=2), torch.ones(4, 6)),
    "sum of exponentials, broadcast": (lambda x: torch.logaddexp(x[:1], x), TURNED),
    "copied sign": (lambda x: x.copysign(x[0, 0, 0]), TURNED),
    "logarithm, broadcast": (lambda x: torch.xlogy(x, x[0].abs()), torch.rand(6, 4, 2).permute(2, 1, 0)),
    "spectrum": (lambda x: torch.fft.rfft(x, dim=1).real + 1, TURNED),
    "power of a number": (lambda x: 2.0**x + x, TURNED),
    "power of a number alone": (lambda x: 2**x, LAST),
    "polar": (lambda x: torch.polar(x.abs(), x).imag * 2, TURNED),
    "take": (lambda i: torch.take(i.float(), i), torch.arange(24).reshape(4, 6).T),
    "loss of each pixel": (lambda x: F.nll_loss(x, (x[:, 0] > 0).long(), reduction="none"), IMAGE.transpose(2, 3)),
}


# With unknown sizes, parts of these run in eager PyTorch.
STATIC = {
    "nearest": (lambda x: F.interpolate(x, scale_factor=(2, 2)), IMAGE.transpose(2, 3)),
    "floor of a quotient": (lambda x: x.div(3.0, rounding_mode="floor"), TURNED),
}


@pytest.mark.parametrize("name", STATIC)
def test_layout_of_what_has_known_sizes(name: str) -> None:
    check(*STATIC[name], options=OPTIONS, dynamic=False)


@pytest.mark.quick(dynamic=[False])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_layout(name: str, dynamic: bool) -> None:
    model, x = CASES[name]
    check(model.eval() if isinstance(model, nn.Module) else model, x, options=OPTIONS, dynamic=dynamic)


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_taken_can_be_viewed(backend: str, dynamic: bool) -> None:
    """`torch.take` returns a contiguous tensor; indexing, its decomposition, would keep the positions' strides."""
    values, positions = torch.randn(2, 3, 3), torch.arange(8).reshape(2, 4).T

    def model(values: Tensor, positions: Tensor) -> Tensor:
        return torch.take(values.reshape(-1), positions).view(-1)

    compiled = tov.compile(model, options=OPTIONS, dynamic=dynamic, backend=backend)
    assert_same(compiled(values, positions), model(values, positions))


TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "a slice, turned": lambda x: x[:, 0].transpose(-1, -2),
    "expanded": lambda x: x[0, 0].expand(3, 4),
    "expanded, turned": lambda x: x[0, 0].expand(3, 4).transpose(0, 1),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_a_later_operator_takes_keeps_its_order(name: str) -> None:
    """A partition output with gaps between its elements becomes dense but keeps the order of its dimensions."""

    def model(x: Tensor, flag: Tensor) -> Tensor:
        return torch.cond(flag.sum() > 0, lambda a: a * 2, lambda a: a + 1, (TAKEN[name](x * 3),))

    check(
        model, torch.randn(2, 3, 4), torch.tensor([1]), coverage=None, fallbacks={"unsupported_op": 1}, options=OPTIONS
    )
