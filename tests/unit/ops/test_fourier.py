"""Fourier transforms and complex numbers inside a graph, against eager PyTorch."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import torchserve_openvino as tov
from helpers import assert_same, check

X = torch.randn(2, 6, 8)
WINDOW = torch.hann_window(64)
BANK = torch.rand(20, 33)


def spectrum(x: Tensor) -> Tensor:
    return torch.stft(x, 64, 16, window=WINDOW, return_complex=True)


def swapped(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[:, :, None, ::2].squeeze(2)


CASES: dict[str, Callable[[Tensor], Any]] = {
    "a real transform": lambda x: torch.fft.rfft(x).abs(),
    "of an odd length": lambda x: torch.fft.rfft(x[..., :7]).abs(),
    "and back": lambda x: torch.fft.irfft(torch.fft.rfft(x)),
    "and back to an odd length": lambda x: torch.fft.irfft(torch.fft.rfft(x[..., :7]), n=7),
    "whole": lambda x: torch.fft.fft(x).real + torch.fft.fft(x).imag,
    "whole and back": lambda x: torch.fft.ifft(torch.fft.fft(x)).real,
    "of two dimensions": lambda x: torch.fft.fft2(x).real,
    "of two real dimensions": lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:]),
    "of all dimensions": lambda x: torch.fft.irfftn(torch.fft.rfftn(x)),
    "of the first dimension": lambda x: torch.fft.rfft(x, dim=0).abs(),
    "of another length": lambda x: torch.fft.rfft(x, n=12).abs() + torch.fft.rfft(x, n=12, norm="ortho").imag,
    "shorter": lambda x: torch.fft.fft(x, n=5).real,
    "orthonormal": lambda x: torch.fft.ifft(torch.fft.fft(x, norm="ortho"), norm="ortho").real,
    "forward": lambda x: torch.fft.irfft(torch.fft.rfft(x, norm="forward"), norm="forward"),
    "FNet": lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real,
    "correlation": lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(x.flip(-1)).conj()),
    "arithmetic": lambda x: (torch.fft.rfft(x) * 2 - torch.fft.rfft(x) / 3 + torch.fft.rfft(x) * x[..., :5]).abs(),
    "sums with numbers": lambda x: ((torch.fft.fft(x) + 1) - x + (2.0 - torch.fft.fft(x))).abs(),
    "quotients": lambda x: (torch.fft.rfft(x) / torch.fft.rfft(x.flip(-1)) + x[..., :5] / torch.fft.rfft(x)).abs(),
    "complex numbers": lambda x: ((torch.fft.rfft(x) * (1 - 2j) + 3j - (1 + 1j)) / (0.5 - 3j)).abs(),
    "of a number": lambda x: (2j / torch.fft.rfft(x) + 1 / torch.fft.rfft(x)).abs(),
    "exponentials": lambda x: torch.exp(torch.fft.rfft(x) * 0.1 + 1j).abs(),
    "sums and means": lambda x: torch.fft.rfft(x).sum(-1).abs() + torch.fft.rfft(x).mean([1, 2]).abs()[:, None],
    "a product of matrices": lambda x: (torch.fft.rfft(x) @ torch.fft.rfft(x).transpose(1, 2)).abs(),
    "the angle": lambda x: torch.fft.rfft(x).angle().cos(),
    "polar": lambda x: torch.fft.irfft(torch.polar(x.abs(), x)),
    "made of parts": lambda x: torch.fft.irfft(torch.complex(x, x.sin())),
    "broadcast": lambda x: (torch.fft.rfft(x) + torch.fft.rfft(x[0])).abs(),
    "moved": lambda x: torch.cat([swapped(torch.fft.rfft(x))[1:], swapped(torch.fft.rfft(x))]).abs(),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_whole_on_openvino(name: str) -> None:
    compiled = check(CASES[name], X, strides=False)
    check(CASES[name], torch.randn(2, 6, 8), compiled=compiled, strides=False)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_transform(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    norm = data.draw(st.sampled_from(["forward", "backward", "ortho"]))
    sizes = [shape[dim] for dim in dims]

    def model(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spectrum = torch.fft.rfftn(x, dim=dims, norm=norm)
        there = torch.fft.fftn(x, dim=dims, norm=norm)
        return spectrum.imag, torch.fft.irfftn(spectrum, s=sizes, dim=dims, norm=norm), there.real * 2

    check(model, torch.randn(shape), strides=False)


@pytest.mark.parametrize("power", [lambda s: s.abs().pow(2), lambda s: torch.view_as_real(s).pow(2).sum(-1)])
@pytest.mark.parametrize("backend", ["openvino", "export"])
def test_a_front_end_for_audio(power: Callable[[Tensor], Tensor], backend: str) -> None:
    class FrontEnd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(BANK @ power(spectrum(x)) + 1e-6)

    model = FrontEnd().eval()
    compiled = tov.compile(model, backend=backend)
    with torch.no_grad():
        for x in (torch.randn(2, 400), torch.randn(2, 400)):
            assert_same(compiled(x), model(x), strides=False)
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks, compiled.report.to_text()


def denoised(x: Tensor) -> Tensor:
    found = spectrum(x)
    return torch.istft(found * torch.sigmoid(found.abs()), 64, 16, window=WINDOW, length=x.shape[-1])


def test_to_a_spectrum_and_back() -> None:
    compiled = check(denoised, torch.randn(2, 400), strides=False)
    check(denoised, torch.randn(2, 400), compiled=compiled, strides=False)


def test_disabled_transforms_run_in_eager_and_are_counted() -> None:
    transforms = {"aten._fft_r2c.default", "aten._fft_c2r.default"}
    compiled = tov.compile(denoised, options={"disabled_ops": sorted(transforms)})
    with torch.no_grad():
        for x in (torch.randn(2, 400), torch.randn(2, 400)):
            assert_same(compiled(x), denoised(x), strides=False)
    assert {each.op for each in compiled.report.fallbacks if each.kind == "disabled_op"} == transforms


def test_complex_inputs_and_outputs_are_views_of_pairs() -> None:
    compiled = tov.compile(lambda x: torch.fft.ifft(x * 2))
    with torch.no_grad():
        x = torch.randn(3, 8, dtype=torch.complex64)
        assert_same(torch.view_as_real(compiled(x)), torch.view_as_real(compiled.eager(x)))
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks


def test_what_has_no_form_in_pairs_stays_in_eager() -> None:
    compiled = tov.compile(lambda x: torch.fft.rfft(x).sqrt().abs())
    with torch.no_grad():
        assert_same(compiled(X), compiled.eager(X), strides=False)
    assert any(each.op == "aten.sqrt.default" and "complex64" in each.reason for each in compiled.report.fallbacks)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_double_precision_stays_in_eager(dtype: torch.dtype) -> None:
    compiled = tov.compile(lambda x: torch.fft.fft(x).abs())
    with torch.no_grad():
        assert_same(compiled(X.to(dtype)), compiled.eager(X.to(dtype)), strides=False)
    report = compiled.report
    assert report.summary.coverage == 0.0 and {each.kind for each in report.fallbacks} == {"unsupported_op"}
    assert any(each.op == "aten.abs.default" and "complex128" in each.reason for each in report.fallbacks)


TRANSFORMS: dict[str, Callable[[Tensor], Any]] = {
    "real": torch.fft.rfft,
    "whole": lambda x: torch.fft.fft(torch.complex(x, x.flip(-1))),
    "inverse": lambda x: torch.fft.ifft(torch.complex(x, x.flip(-1)), norm="ortho"),
    "back to an even length": lambda x: torch.fft.irfft(torch.complex(x, x.flip(-1))[..., : x.shape[-1] // 2 + 1]),
    "of other axes": lambda x: torch.fft.fftn(torch.complex(x, x.flip(-1)).transpose(0, 1), dim=(0, 1)),
}


def _kinds(compiled: tov.CompiledModule) -> set[str]:
    """Returns the types of the kernels that a compiled model runs."""
    return {
        node.get_rt_info()["layerType"].value
        if hasattr(node.get_rt_info()["layerType"], "value")
        else str(node.get_rt_info()["layerType"])
        for partition in compiled.running
        if partition.compiled is not None
        for node in partition.compiled.compiled.get_runtime_model().get_ops()
    }


ONE_PART: dict[str, Callable[[Tensor], Tensor]] = {
    "power": lambda x: spectrum(x).abs().pow(2) + 1,
    "FNet": lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real * 2,
    "moved": lambda x: swapped(torch.fft.rfft(x.unflatten(-1, (20, 20)))).imag * 2,
    "negative": lambda x: (-torch.fft.rfft(x)).real * 2,
    "a view": lambda x: torch.fft.rfft(x.unflatten(-1, (20, 20))).reshape(len(x), -1).real * 2,
    "a copy": lambda x: torch.fft.rfft(x).clone().real * 2,
}


@pytest.mark.parametrize("name", ONE_PART)
def test_parts_of_complex_numbers_are_not_joined_and_taken_apart(name: str) -> None:
    compiled = check(ONE_PART[name], torch.randn(2, 400), strides=False)
    assert not {"Concat", "Concatenation", "DFT", "RDFT"} & _kinds(compiled) or name == "FNet"
    assert "DFT" not in _kinds(compiled)


def test_parts_that_are_returned_are_memory_of_their_own() -> None:
    """A part is a tensor of the caller's, which is not what eager PyTorch returns."""

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pairs = torch.stack([x * 1, y], -1)
        return pairs[..., 1], pairs.permute(1, 0, 2)[..., 1].unsqueeze(0), pairs[..., 1] * 2

    x, y = torch.randn(3, 5), torch.randn(3, 5)
    compiled = check(model, x, y, strides=False)
    with torch.no_grad():
        first, second, _ = compiled(x, y)
    before = y.clone()
    first.zero_(), second.zero_()
    assert torch.equal(y, before)


def test_parts_that_are_joined_in_another_type_keep_it() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([x, y], -1)[..., 0] / 2

    compiled = tov.compile(model, options={"min_partition_us": 0})
    with torch.no_grad():
        args = torch.arange(6, dtype=torch.float16), torch.randn(6)
        assert_same(compiled(*args), model(*args))


@pytest.mark.parametrize("shape", [(5, 300), (3, 300, 4), (2, 300, 3, 2), (300,), (2, 2, 2)])
def test_any_axis_of_a_halved_product(shape: tuple[int, ...]) -> None:
    axis = shape.index(max(shape))

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        there = torch.fft.fft(torch.complex(x, y), dim=axis, norm="ortho")
        back = torch.fft.irfft(torch.fft.rfft(x, dim=axis), n=shape[axis], dim=axis)
        return there.real * there.imag, back * 2

    check(model, torch.randn(shape), torch.randn(shape), strides=False)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("onesided", [True, False])
@pytest.mark.parametrize("size", [64, 300])
def test_forms_of_stft(size: int, onesided: bool, center: bool) -> None:
    def model(x: Tensor) -> Tensor:
        found = torch.stft(
            x, size, size // 4, center=center, onesided=onesided, normalized=not center, return_complex=True
        )
        return torch.view_as_real(found) * 2

    check(model, torch.randn(2, 1200), strides=False)


def test_open_sizes_beside_the_axis() -> None:
    def model(x: Tensor) -> Tensor:
        there = torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1)
        return there.real * 2

    compiled = check(model, torch.randn(3, 300, 8), dynamic=None, strides=False, coverage=None)
    for rows in (5, 6):
        check(model, torch.randn(rows, 300, 8), compiled=compiled, strides=False, coverage=None)


@pytest.mark.parametrize("length", [64, 100, 400, 997, 1024, 4096])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_long_transforms_keep_their_digits(name: str, length: int) -> None:
    """Of lengths that are no power of 2, OpenVINO's loses a thousandth of the value at 10,000."""
    x = torch.randn(3, length)
    compiled = tov.compile(TRANSFORMS[name], options={"min_partition_us": 0})
    with torch.no_grad():
        found = torch.view_as_real(compiled(x)) if name != "back to an even length" else compiled(x)
        right = TRANSFORMS[name](x.double())
        right = torch.view_as_real(right) if right.is_complex() else right
    assert (found - right).norm() < 1e-6 * right.norm()
    assert not compiled.report.fallbacks


@pytest.mark.parametrize("length", [1025, 10_000])
def test_long_transforms_without_a_power_of_2_run_in_eager(length: int) -> None:
    compiled = tov.compile(lambda x: torch.fft.rfft(x).abs())
    x = torch.randn(2, length)
    with torch.no_grad():
        assert_same(compiled(x), torch.fft.rfft(x).abs(), strides=False)
    assert "no power of 2" in str(compiled.report.fallbacks)


def test_a_dynamic_batch() -> None:
    compiled = check(lambda x: torch.fft.rfft(x).abs() + 1, torch.randn(3, 8), dynamic=True, coverage=None)
    check(compiled.eager, torch.randn(5, 8), compiled=compiled, coverage=None)


def test_the_traditional_backend_refuses_by_name() -> None:
    compiled = tov.compile(CASES["correlation"], backend="openvino_ts")
    with torch.no_grad():
        assert_same(compiled(X), compiled.eager(X), strides=False)
    (fallback,) = compiled.report.fallbacks
    assert fallback.kind == "conversion_failed"
    assert "openvino_fft::r2c" in fallback.reason and "openvino_fft::c2r" in fallback.reason


def test_from_the_cache(tmp_path: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.rfft(x).abs() * 2

    options = {"model_caching": True, "cache_dir": str(tmp_path)}
    with torch.no_grad():
        for _ in range(2):
            compiled = tov.compile(Model().eval(), options=options).freeze()
            for _ in range(3):
                assert_same(compiled(X), compiled.eager(X), strides=False)
    assert compiled.report.to_dict()["cache"]["calls"]["hits"] == 1


def test_gradients() -> None:
    x = X.clone().requires_grad_()
    y = X.clone().requires_grad_()
    tov.compile(CASES["a real transform"])(x).sum().backward()
    CASES["a real transform"](y).sum().backward()
    assert_same(x.grad, y.grad, strides=False)


@pytest.mark.parametrize("arguments", [(1, 3, 2), (-1, 4, 4), (0, 2, 1)])
def test_windows(arguments: tuple[int, int, int]) -> None:
    check(lambda x: x.unfold(*arguments) * 2, X, strides=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_sum_has_the_sign_of_zero_that_torch_gives_it(dynamic: bool) -> None:
    def model(real: Tensor, imaginary: Tensor) -> tuple[Tensor, ...]:
        x = torch.complex(real, imaginary)
        return (x + 1).angle(), (x - 1).angle(), (1 + x).angle(), (1 - x).angle()

    check(model, torch.tensor([-3.0, -3.0, 3.0, 3.0]), torch.tensor([-0.0, 0.0, -0.0, 0.0]), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_quotients_are_scaled_as_those_of_torch(dynamic: bool) -> None:
    """The squares of the parts would overflow or vanish; a quotient by zero has the infinities that torch gives it."""
    dividends = torch.tensor([[1.0, 1.0], [1e30, 1e30], [1e-30, 1e-30], [3.0, 4.0], [0.0, 0.0], [1.0, -2.0]])
    divisors = torch.tensor([[0.0, 0.0], [1e30, 2e30], [1e-30, -3e-30], [1e20, 1e-20], [0.0, 0.0], [0.0, 2.0]])

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x, y = torch.view_as_complex(x), torch.view_as_complex(y)
        return torch.view_as_real(x / y), torch.view_as_real(y.reciprocal())

    check(model, dividends, divisors, dynamic=dynamic)
    check(model, torch.randn(1000, 2), torch.randn(1000, 2), dynamic=dynamic)


class Rotary(nn.Module):
    """Rotary embeddings as Llama's original code computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)
        angles = torch.outer(torch.arange(512.0), 10000.0 ** -(torch.arange(0, 128, 2) / 128))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        pairs = torch.view_as_complex(self.layer(x).float().reshape(batch, length, 2, 64, 2))
        turned = pairs * self.turns[:length].view(1, length, 1, 64)
        return torch.view_as_real(turned).flatten(3).type_as(x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_rotary_embeddings_of_complex_numbers(dynamic: bool) -> None:
    model = Rotary().eval()
    compiled = check(model, torch.randn(2, 500, 256), dynamic=dynamic)
    check(model, torch.randn(1, 33, 256), compiled=compiled)
    assert compiled.report.summary.coverage == 1.0
