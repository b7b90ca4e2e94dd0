"""Convolutions along an open length: as matrix products, they give what eager PyTorch gives."""

import openvino as ov
import pytest
import torch
from openvino import opset13 as ops
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same
from torchserve_openvino.backend import OpenAxes
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.passes.ov.open_lengths import multiply_open_lengths
from torchserve_openvino.passes.pass_context import PassContext

LENGTHS = (64, 41, 200, 42)
# Kernel, stride, padding, dilation, bias.
WINDOWS = [
    (10, 5, 0, 1, True),
    (3, 2, 0, 1, False),
    (3, 2, 1, 1, True),
    (2, 2, 0, 1, True),
    (1, 1, 0, 1, True),
    (1, 3, 0, 1, False),
    (4, 1, 3, 2, True),
    (3, 3, 2, 4, True),
    # Too many copies, so that it stays a convolution.
    (9, 2, 4, 1, True),
]


class Normed(nn.Module):
    """Convolutions as in wav2vec 2.0: a norm over the channels of each."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(1, 64, 10, 5), nn.Conv1d(64, 64, 3, 2), nn.Conv1d(64, 72, 2, 2)])
        self.norms = nn.ModuleList([nn.LayerNorm(each.out_channels) if norm else nn.Identity() for each in self.layers])

    def forward(self, x):
        y = x[:, None]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = nn.functional.gelu(norm(layer(y).transpose(-2, -1)).transpose(-2, -1))
        return y


def check(model, axes, make, **spec) -> None:
    compiled = compile_with(model.eval(), CompileSpec(open_axes=OpenAxes(axes), **spec))
    for length in LENGTHS:
        for _ in range(2):
            inputs = make(length)
            with compiled.poisoned(), torch.no_grad():
                assert_same(compiled(*inputs), model(*inputs))
    summary = compiled.report.summary
    assert summary.coverage == 1.0 and not compiled.report.fallbacks and summary.graphs == 1


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: "-".join(map(str, window)))
def test_windows(window, backend) -> None:
    kernel, stride, padding, dilation, bias = window
    conv = nn.Conv1d(3, 64, kernel, stride, padding, dilation, bias=bias)
    check(conv, {0: (2,)}, lambda length: [torch.randn(2, 3, length)], backend=backend)


class Around(nn.Module):
    """Operators before and after, a result that several use, a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 64, 3, padding=1), nn.Conv1d(64, 64, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(64, 1))

    def forward(self, x, y):
        a = self.first(x.relu() - 1)
        b = self.second((a * self.scale + 0.5).tanh())
        return a, b + a, (b / 2).sigmoid() * y, b.transpose(1, 2) * y.transpose(1, 2), torch.cat([b, a.abs()], 1)


def test_what_is_around() -> None:
    axes = {0: (2,), 1: (2,)}
    check(Around(), axes, lambda length: [torch.randn(2, 4, length), torch.randn(2, 64, length)])


@pytest.mark.parametrize("norm", [True, False])
def test_batch_and_length_are_open(norm) -> None:
    sizes = iter([2, 1, 3, 2] * 2)
    check(Normed(norm), {0: (0, 1)}, lambda length: [torch.randn(next(sizes) + 1, length)])


def test_with_gradients_and_while_weights_change() -> None:
    model = Normed()
    compiled = compile_with(model.eval(), CompileSpec(open_axes=OpenAxes({0: (1,)})))
    for length in LENGTHS:
        x = torch.randn(2, length, requires_grad=True)
        found, expected = compiled(x), model(x)
        assert_same(found, expected)
        assert_same(*(torch.autograd.grad(each.square().sum(), x) for each in (found, expected)))
        with torch.no_grad():
            model.layers[1].weight.mul_(1.5)
            assert_same(compiled(x), model(x))


def test_a_length_below_the_kernel_is_refused_as_in_eager() -> None:
    model = nn.Conv1d(3, 64, 3).eval()
    compiled = compile_with(model, CompileSpec(open_axes=OpenAxes({0: (2,)})))
    with torch.no_grad():
        compiled(torch.randn(2, 3, 9))
        for length in (2, 1, 0):
            with pytest.raises(RuntimeError):
                model(torch.randn(2, 3, length))
            with pytest.raises(RuntimeError):
                compiled(torch.randn(2, 3, length))


def convolutions(length: int) -> ov.Model:
    """Two convolutions, each followed by a norm over the channels."""
    value = made = ops.parameter(ov.PartialShape([-1, 64, length]), ov.Type.f32)
    swap = ops.constant([0, 2, 1])
    for seed in range(2):
        weights = ops.constant(torch.randn(64, 64, 3, generator=torch.Generator().manual_seed(seed)).numpy())
        value = ops.convolution(value, weights, [2], [0], [0], [1])
        value = ops.add(value, ops.constant(torch.rand(1, 64, 1).numpy()))
        value = ops.transpose(ops.mvn(ops.transpose(value, swap), [-1], True, 1e-5, "inside_sqrt"), swap)
        value = ops.gelu(value, "erf")
    return ov.Model([value], [made])


def kinds(model: ov.Model) -> list[str]:
    return [each.get_type_name() for each in model.get_ordered_ops()]


def test_nothing_is_transposed_between_convolutions() -> None:
    model = convolutions(-1)
    multiply_open_lengths(model, PassContext())
    assert "Convolution" not in kinds(model) and kinds(model).count("MatMul") == 2
    # The first operand and the result; each bias, which is constant.
    assert kinds(model).count("Transpose") == 2 + 2


def test_a_fixed_length_stays_a_convolution() -> None:
    model = convolutions(32)
    before = kinds(model)
    multiply_open_lengths(model, PassContext())
    assert kinds(model) == before


@pytest.mark.parametrize("kind", ["samples", "pictures"])
def test_sizes_at_which_torch_takes_another_kernel_trace_nothing_anew(kind) -> None:
    torch.manual_seed(0)
    if kind == "samples":
        model = nn.Sequential(nn.Conv1d(1, 8, 10, 5), nn.ReLU(), nn.Conv1d(8, 4, 3, 2)).eval()
        shapes = [(1, 1, 16_000), (1, 1, 20_480), (1, 1, 20_481), (1, 1, 64_000), (1, 1, 100)]
    else:
        model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
        shapes = [(2, 3, 64, 48), (2, 3, 300, 200), (20, 3, 50, 70), (2, 3, 3, 1000)]
    compiled = tov.compile(model, dynamic=True)
    with torch.no_grad():
        for shape in shapes:
            values = torch.randn(shape)
            assert_same(compiled(values), model(values))
            assert compiled(values).stride() == model(values).stride()
        assert compiled.report.summary.graphs == 1 and compiled.report.summary.fallbacks == 0
        # What eager refuses is refused.
        short = torch.randn(1, 1, 9) if kind == "samples" else torch.randn(2, 4, 64, 48)
        for each in (model, compiled):
            with pytest.raises(RuntimeError):
                each(short)
