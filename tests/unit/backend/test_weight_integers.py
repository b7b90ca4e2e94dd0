"""Weights of few bits that a model unpacks by itself: computed once, multiplied in 4 bits, in any composition."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchserve_openvino as tov
from helpers import assert_same

SIZE = 64


class Packed(nn.Module):
    """Two numbers of 4 bits to a byte, and one of several ways to use them."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.packed = nn.Buffer(torch.randint(0, 256, (SIZE, SIZE // 2), dtype=torch.uint8))
        self.scale = nn.Buffer(torch.rand(SIZE, 1) * 0.02)
        self.zero = nn.Buffer(torch.randint(0, 16, (SIZE, 1), dtype=torch.int32))

    def unpacked(self) -> Tensor:
        return torch.stack((self.packed & 15, self.packed >> 4), -1).reshape(SIZE, SIZE)

    def forward(self, x: Tensor) -> Any:
        w, scale = self.unpacked(), self.scale
        match self.use:
            case "zero points":
                return x @ ((w.to(torch.int32) - self.zero).float() * scale).t()
            case "constant zero":
                return x @ ((w - 8.0) * scale).t()
            case "on the right":
                return x @ ((w.float() - self.zero) * scale)
            case "groups":
                groups = w.reshape(SIZE, 4, SIZE // 4).float() - 8
                return (
                    x
                    @ (groups * scale.reshape(SIZE, 1, 1) * torch.tensor([1.0, 2.0, 4.0, 8.0])[:, None]).flatten(1).t()
                )
            case "wraps around":
                return x @ ((w - self.zero.to(torch.uint8)).float() * scale).t()
            case "is returned":
                return x @ (w.float() * scale).t(), w
            case "depends on the input":
                return x @ ((w.to(torch.int32) + x.shape[0]).float() * scale).t()
            case "is an index":
                return x[:, w[0].long() % x.shape[1]] @ (w.float() * scale).t()
            case "64 bits":
                return x @ (((w.to(torch.int64) * 2**33) >> 33).float() * scale).t()
            case "several uses":
                return x @ ((w - 8.0) * scale).t() + w.sum() * x
            case "convolution":
                kernel = (w.float() * scale)[:, :, None, None]
                return nn.functional.conv2d(x[:, :, None, None], kernel).flatten(1)
            case "two products":
                weight = (w.float() - self.zero) * scale
                return x @ weight @ weight.t()
            case _:
                return x.sum(0) @ ((w.float() - self.zero) * scale)


USES = {
    "zero points": "u4", "constant zero": "u4", "on the right": "u4", "groups": "u4", "wraps around": "u8",
    "is returned": "u4", "depends on the input": "", "is an index": "u4", "64 bits": "u4", "several uses": "u4",
    "convolution": "", "two products": "u4", "vector": "u4",
}  # fmt: skip


@pytest.mark.quick(dynamic=[False])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_is_eagers(use: str, dynamic: bool) -> None:
    model = Packed(use).eval()
    compiled = tov.compile(model, dynamic=dynamic)
    with torch.no_grad():
        for step in range(3):
            x = torch.randn(3 + step * dynamic, SIZE)
            assert_same(compiled(x), model(x))
            if step == 1:
                model.packed.copy_(torch.randint(0, 256, model.packed.shape, dtype=torch.uint8))
    assert compiled.report.summary.coverage == 1.0 and compiled.report.fallbacks == []
    if USES[use]:
        assert USES[use] in {kernel.precision for kernel in compiled.report.kernels()}


@pytest.mark.parametrize("use", ["zero points", "is returned", "several uses"])
def test_gradients(use: str) -> None:
    model = Packed(use).eval()
    compiled = tov.compile(model)
    x = torch.randn(3, SIZE, requires_grad=True)
    expected, got = model(x), compiled(x)
    assert_same(got, expected)
    first = [each[0] if isinstance(each, tuple) else each for each in (got, expected)]
    mine, theirs = (torch.autograd.grad(each.sum(), x)[0] for each in first)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_weights_that_are_no_constants_are_unpacked_at_each_call() -> None:
    """Where weights change at each call, they are inputs of the graph."""
    model = Packed("zero points").eval()
    compiled = tov.compile(model)
    x = torch.randn(3, SIZE)
    with torch.no_grad():
        for _ in range(8):
            model.packed.copy_(torch.randint(0, 256, model.packed.shape, dtype=torch.uint8))
            assert_same(compiled(x), model(x))
    assert not any(each.kind == "unsupported_op" for each in compiled.report.fallbacks), compiled.report.to_text()


def test_a_disabled_operator_stays_in_eager() -> None:
    model = Packed("zero points").eval()
    compiled = tov.compile(model, options={"disabled_ops": ["aten.bitwise_and"]})
    x = torch.randn(3, SIZE)
    with torch.no_grad():
        assert_same(compiled(x), model(x))
    assert ("disabled_op", "aten.bitwise_and.Scalar") in {(each.kind, each.op) for each in compiled.report.fallbacks}


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
def test_integers_of_weights_that_another_part_needs(backend: str) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("numbers", torch.arange(6, dtype=torch.int32))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            numbers = self.numbers * 3 + 1
            first = (x.relu() + numbers).digamma()
            return first * numbers + numbers.sum(), numbers[1:] + 1, numbers.flip(0).cumsum(0)

    model = Parts().eval()
    compiled = tov.compile(model, backend=backend, options={"min_partition_us": 0})
    with torch.no_grad():
        for _ in range(2):
            x = torch.rand(2, 6)
            torch.testing.assert_close(compiled(x), model(x))
    kinds = {fallback.kind for fallback in compiled.report.fallbacks}
    assert kinds <= {"unsupported_op"}, compiled.report.fallbacks


class _Truncated(nn.Module):
    """A weight whose fractions are cut off before it is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.q: Tensor
        self.register_buffer("q", torch.randint(0, 16, (64, 64), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        whole = (self.q.float() * 0.25).to(torch.int32)
        return x @ (whole.float() * 0.5).t()


def test_a_cast_within_a_weight_cuts_fractions_off() -> None:
    model, x = _Truncated().eval(), torch.randn(3, 64)
    assert_same(tov.compile(model)(x), model(x))
