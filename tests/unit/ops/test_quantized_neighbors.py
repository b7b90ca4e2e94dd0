"""Every operator to which OpenVINO moves a scale from before it gives what eager PyTorch does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

# Registers the operators.
from torch.ao.quantization.fx import _decomposed  # noqa: F401
from torch.nn import functional as F

import torchserve_openvino as tov
from torchserve_openvino.backend.runtime import build

Q = torch.ops.quantized_decomposed
SCALE, ZERO = 0.05, 3


def dequantized(x: Tensor) -> Tensor:
    """Per tensor."""
    x = Q.quantize_per_tensor(x, SCALE, ZERO, -128, 127, torch.int8)
    return Q.dequantize_per_tensor(x, SCALE, ZERO, -128, 127, torch.int8)


class PerChannel(nn.Module):
    """Another scale for each index of axis 1."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # Quotients stay integers.
        self.register_buffer("scales", SCALE / torch.tensor([1.0, 2.0, 4.0]).repeat(channels // 3))
        self.register_buffer("zeros", torch.arange(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = Q.quantize_per_channel(x, self.scales, self.zeros, 1, -128, 127, torch.int8)
        return Q.dequantize_per_channel(x, self.scales, self.zeros, 1, -128, 127, torch.int8)


class Convolved(nn.Module):
    """What a convolution in 8 bits makes of the values, each channel with its own scale."""

    def __init__(self, shape: tuple[int, ...], bias: float = 0, transposed: bool = False) -> None:
        super().__init__()
        if (dimensions := len(shape) - 2) < 1:
            pytest.skip("nothing to convolve")
        self.register_buffer("bias", torch.linspace(-bias, bias, 6) if bias else None)
        self.convolve = getattr(F, f"conv{'_transpose' if transposed else ''}{dimensions}d")
        weight = torch.linspace(-127, 127, 6 * 6 * 3**dimensions).round().to(torch.int8)
        self.register_buffer("weight", weight.reshape(6, 6, *[3] * dimensions))
        self.register_buffer("scales", torch.arange(1, 7) / 500)

    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros(6, dtype=torch.int64)
        weight = Q.dequantize_per_channel(self.weight, self.scales, zeros, 0, -128, 127, torch.int8)
        return self.convolve(dequantized(x), weight, self.bias, padding=1)


class Multiplied(nn.Module):
    """A layer in 8 bits over the last axis, each column with its own scale."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        weight = torch.linspace(-127, 127, columns * columns).round().to(torch.int8)
        self.register_buffer("weight", weight.reshape(columns, columns))
        self.register_buffer("scales", torch.arange(1, columns + 1) / 500)

    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros(len(self.scales), dtype=torch.int64)
        weight = Q.dequantize_per_channel(self.weight, self.scales, zeros, 0, -128, 127, torch.int8)
        return F.linear(dequantized(x), weight)


def crossed(x: Tensor) -> Tensor:
    """A product of values in 8 bits with themselves."""
    x = x if x.dim() > 2 else x.T
    return dequantized(x) @ dequantized(x.transpose(-1, -2))


WEIGHT = torch.linspace(-1, 1, 8 * 6 * 3 * 3).reshape(8, 6, 3, 3)
# Of [items, 6, rows, columns].
IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "average": lambda x: F.avg_pool2d(x, 2),
    "average padded": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "average without padding": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "largest": lambda x: F.max_pool2d(x, 3, 2, 1),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive uneven": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "shuffled": lambda x: F.pixel_shuffle(x[:, :4], 2),
    "unshuffled": lambda x: F.pixel_unshuffle(x, 2),
    "channels shuffled": lambda x: F.channel_shuffle(x, 3),
    "padded": lambda x: F.pad(x, (1, 2, 0, 1)),
    "padded with a value": lambda x: F.pad(x, (1, 2, 0, 1), value=-3.7),
    "reflected": lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"),
    "normalized": lambda x: F.normalize(x, dim=1),
    "instances": lambda x: F.instance_norm(x),
    "groups": lambda x: F.group_norm(x, 3),
    "convolved": lambda x: F.conv2d(x, WEIGHT.to(x.dtype)),
    "convolved by channel": lambda x: F.conv2d(x, WEIGHT[:6, :1], groups=6, padding=1),
    "transposed": lambda x: F.conv_transpose2d(x, WEIGHT.transpose(0, 1).contiguous(), stride=2),
    "clamped after convolving": lambda x: F.conv2d(x, WEIGHT).clamp(0, 6).mean((2, 3)),
    "mean": lambda x: x.mean((2, 3)),
    "mean of channels": lambda x: x.mean(1),
    "sum of rows": lambda x: x.sum(2, keepdim=True),
    "least": lambda x: x.amin((1, 3)),
}
# Of any shape whose axis 1 has 6.
ANY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.relu(),
    "leaky": lambda x: F.leaky_relu(x, 0.3),
    "weighted": lambda x: F.prelu(x, torch.linspace(0.1, 0.6, 6)),
    "clamped": lambda x: x.clamp(-1.3, 2.2),
    "clamped between": lambda x: x.clamp(-1.327, 1.523) * 2,
    "clamped at an end": lambda x: x.clamp(max=1.3),
    "clamped after moving": lambda x: x.transpose(0, 1).clamp(0, 1.523),
    "soft sign": F.softsign,
    "hard swish": F.hardswish,
    "swish": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "gelu": F.gelu,
    "logarithms": lambda x: x.log_softmax(1),
    "twice": lambda x: torch.cat([x * -2.5, (x * -2.5).sum(1, keepdim=True)], 1),
    "scaled and added": lambda x: (x * -2.5) + (x * -2.5).flip(0),
    "gated": lambda x: x * x.mean((0, 1), keepdim=True).sigmoid(),
    "negative": lambda x: -x,
    "absolute": lambda x: x.abs() + 1,
    "times": lambda x: x * -2.5,
    "plus": lambda x: x + 0.7,
    "divided": lambda x: x / -3,
    "added to itself": lambda x: x + x.flip(0),
    "times itself": lambda x: x * x.flip(1),
    "concatenated": lambda x: torch.cat([x, x * 2, x + 1], 1),
    "concatenated otherwise": lambda x: torch.cat([x.flip(0), x], -1),
    "split": lambda x: torch.cat(x.split(2, 1)[::-1], 1),
    "chunks": lambda x: x.chunk(3, 1)[1],
    "sliced": lambda x: x[:, 1::2],
    "gathered": lambda x: x[:, [4, 0, 0, 5]],
    "last": lambda x: x[..., -1],
    "transposed": lambda x: x.transpose(0, 1) * 2,
    "moved": lambda x: x.movedim(1, -1).relu(),
    "flattened": lambda x: x.flatten(1) + 1,
    "as rows": lambda x: x.reshape(-1, 2).relu(),
    "wider": lambda x: x.unsqueeze(1).expand(-1, 3, *x.shape[1:]) + 0.5,
    "repeated": lambda x: x.repeat_interleave(2, 1),
    "rolled": lambda x: x.roll(1, 1),
    "softmax": lambda x: x.softmax(1),
    "layer": lambda x: F.layer_norm(x, x.shape[1:]),
    "mean": lambda x: x.mean(1),
    "mean of items": lambda x: x.mean(0),
    "sum": lambda x: x.sum(-1),
    "sum kept": lambda x: x.sum(1, keepdim=True) * 0.5,
    "largest": lambda x: x.amax(1),
    "least of all but items": lambda x: x.flatten(1).amin(1),
    "norm": lambda x: x.norm(dim=1),
    "variance": lambda x: x.var(1),
    "product": lambda x: x.transpose(1, -1) @ torch.linspace(-1, 1, 6 * 4).reshape(6, 4),
    "product with itself": lambda x: x.flatten(1) @ x.flatten(1).T,
    "sigmoid": lambda x: x.sigmoid(),
    "where": lambda x: torch.where(x > 0.4, x, x - 1),
    "quantized again": lambda x: dequantized(x * 0.7713).relu(),
}
SHAPES = {
    "images": (3, 6, 8, 6),
    "rows": (3, 6, 5),
    "one column": (4, 6, 1),
    "vectors": (4, 6),
    "volumes": (2, 6, 2, 3, 4),
}

BEFORE: dict[str, Callable[[tuple[int, ...]], Callable[[Tensor], Tensor]]] = {
    "tensor": lambda shape: dequantized,
    "channel": lambda shape: PerChannel(6),
    "convolved": Convolved,
    "biased": lambda shape: Convolved(shape, bias=0.7),
    "deconvolved": lambda shape: Convolved(shape, transposed=True),
    "multiplied": lambda shape: Multiplied(shape[-1]),
    "crossed": lambda shape: crossed,
}
# Without its fusion of elementwise operators, OpenVINO fuses more of them with convolutions.
MODES = ("static", "unfused", "symbolic")


@pytest.mark.quick(shape=["images"], kind=["tensor", "convolved"], mode=["static"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", BEFORE)
@pytest.mark.parametrize(
    ("shape", "name", "after"),
    [
        pytest.param(shape, name, after, id=f"{shape}-{name}")
        for shape, operators in [("images", IMAGES), *((shape, ANY) for shape in SHAPES)]
        for name, after in operators.items()
    ],
)
def test_an_operator_after_dequantization(
    shape: str, name: str, after: Callable[[Tensor], Tensor], kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "unfused":
        monkeypatch.setattr(build, "crashes_plugin", lambda model: "any")
    before = BEFORE[kind](SHAPES[shape])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = before

        def forward(self, x: Tensor) -> Tensor:
            return after(self.before(x))

    model = Model().eval()
    compiled = tov.compile(model, dynamic=mode == "symbolic")
    for seed in range(2):
        noise = torch.Generator().manual_seed(seed)
        # Far from halfway between two integers.
        x = torch.randint(-60, 60, SHAPES[shape], generator=noise) * SCALE
        with torch.no_grad():
            expected = model(x)
            scale = max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(compiled(x), expected, rtol=2e-4, atol=2e-4 * scale)


@pytest.mark.parametrize(
    "after",
    [
        lambda y: y + y.flip(0), lambda y: (y + y.roll(1, 0)) * 2, lambda y: y.cumsum(0) + y,
        lambda y: torch.cat([y[3:], y[:3]]) - y,
    ],
)  # fmt: skip
def test_a_product_of_one_row_without_a_batch(after: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    before, behind = Multiplied(6), nn.Linear(6, 4)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return behind(after(before(x)))

    compiled, x = tov.compile(Model()), torch.tensor([3.0, -40.0, 12.0, 55.0, -1.0, 20.0]) * SCALE
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), Model()(x), rtol=2e-4, atol=2e-4)
