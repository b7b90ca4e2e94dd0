"""Sums, norms and running sums of up to some million floats keep the digits that they have in eager PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchserve_openvino as tov

MILLION = 1_000_000
OPTIONS = {"min_partition_us": 0}


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).abs().max() / exact.abs().max())


def check_digits(
    function: Callable[..., Any], x: torch.Tensor, *, coverage: float | None = 1.0, most: float = 1e-5, **how: Any
) -> tov.CompiledModule:
    """Compares a compiled function with eager PyTorch in double precision."""
    compiled = tov.compile(function, options=OPTIONS, **how)
    exact = function(x.double())
    for _ in range(2):
        assert relative_error(compiled(x), exact) < most
    assert coverage is None or compiled.report.summary.coverage == coverage
    return compiled


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)) + 0.5


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# Functions with the shape of their input; 1,000,003 is a prime number.
ALONG_ONE = {
    "sum": (lambda x: x.sum(), (MILLION,)),
    "mean": (lambda x: (x + 50).mean(), (3 * MILLION,)),
    "sum of a prime number of values": (lambda x: x.sum(), (1_000_003,)),
    "mean of a prime number of values": (lambda x: (x + 50).mean(-1, keepdim=True), (2, 1_000_003)),
    "sum of rows": (lambda x: x.sum(0), (MILLION, 4)),
    "mean of the middle": (lambda x: (x + 50).mean(1), (2, 200_000, 8)),
    "sum of the first two axes": (lambda x: (x + 5).sum((0, 1)), (1000, 1000, 3)),
    "all": (lambda x: (x + 50).mean(), (10, 100_000)),
    "mean of two axes": (lambda x: (x + 50).mean((0, 2), keepdim=True), (2, 3, 400_000)),
    "mean of height and width": (lambda x: (x + 50).mean((2, 3)), (1, 3, 500, 500)),
    "global pooling": (lambda x: F.adaptive_avg_pool2d(x + 50, 1), (1, 3, 500, 500)),
    "variance": (lambda x: (x + 50).var(), (3 * MILLION,)),
    "variance of the middle": (lambda x: (x + 10).var(1), (2, 200_000, 8)),
    "variance with a correction": (lambda x: torch.var(x + 50, 0, correction=2), (MILLION,)),
    "deviation": (lambda x: (x + 50).std(-1, correction=0), (2, MILLION)),
    "squared error": (lambda x: F.mse_loss(x, x + 5), (3 * MILLION,)),
    "norm": (lambda x: x.norm(), (3, MILLION)),
    "norms of other orders": (lambda x: x.norm(1) + torch.linalg.vector_norm(x, 3), (3 * MILLION,)),
    "largest": (lambda x: torch.linalg.vector_norm(x, float("inf")), (MILLION,)),
    "logsumexp": (lambda x: x.logsumexp(0), (MILLION,)),
    "softmax": (lambda x: x.softmax(-1), (2, MILLION)),
    "logarithm of softmax": (lambda x: x.log_softmax(0), (MILLION,)),
    "layer norm": (lambda x: F.layer_norm(x + 3, x.shape[1:]), (2, 1_000_003)),
    "group norm": (lambda x: F.group_norm(x + 3, 1), (1, 4, MILLION)),
    "instance norm": (lambda x: F.instance_norm(x + 3), (1, 2, 100, 10_000)),
    "batch norm": (lambda x: F.batch_norm(x + 3, None, None, training=True), (4, 3, 90_000)),
    "root mean square": (lambda x: x * x.pow(2).mean(-1, keepdim=True).rsqrt(), (MILLION,)),
    "mean of all that are numbers": (lambda x: torch.nanmean(x + 5), (MILLION,)),
    "running sum": (lambda x: x.cumsum(0), (MILLION,)),
    "running sum of a prime number of values": (lambda x: x.cumsum(-1), (2, 100_003)),
    "running sum of the middle": (lambda x: x.cumsum(1), (2, 50_000, 3)),
}


@pytest.mark.quick(backend=["openvino"])
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("name", ALONG_ONE)
def test_digits_of_long_reductions(name: str, backend: Any) -> None:
    function, shape = ALONG_ONE[name]
    # Running sums of both signs come close to 0, where eager PyTorch has few digits either.
    x = positive(*shape) if "sum" in name else normal(*shape)
    check_digits(function, x, backend=backend, coverage=1.0 if backend == "openvino" else None)


@pytest.mark.parametrize("size", [2**14 - 1, 2**14, 2**14 + 1, 2**14 + 2])
def test_both_sides_of_the_length_that_is_split(size: int) -> None:
    check_digits(lambda x: x.sum(1), positive(2, size, 3))
    check_digits(lambda x: x.mean((0, 2), keepdim=True), positive(2, 3, size, 2))


@pytest.mark.parametrize("size", [2**12, 2**12 + 1, 2**20, 2**20 + 1, 2**20 + 2])
def test_both_sides_of_the_lengths_at_which_rows_are_added_otherwise(size: int) -> None:
    check_digits(lambda x: x.sum(), positive(size))
    check_digits(lambda x: x.mean(0, keepdim=True), positive(size))
    check_digits(lambda x: x.sum(-1), positive(2, size))
    check_digits(lambda x: F.layer_norm(x + 3, x.shape[1:]), normal(2, size))


@pytest.mark.parametrize("size", [2**14 - 1, 2**14, 2**14 + 1, 2**14 + 4])
def test_both_sides_of_the_length_of_running_sums(size: int) -> None:
    check_digits(lambda x: x.cumsum(-1), positive(2, size))


def test_a_logarithm_of_softmax_has_the_digits_that_its_gradient_needs() -> None:
    def gradient(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        x = x.detach().clone().requires_grad_()
        function(x).sum().backward()
        return x.grad

    x = normal(MILLION)
    exact = gradient(lambda x: F.log_softmax(x, 0), x.double())
    compiled = tov.compile(lambda x: F.log_softmax(x, 0), options=OPTIONS)
    assert relative_error(gradient(compiled, x), exact) < 3e-6


def test_narrow_floats_are_split_as_well() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x = positive(2, 50_000).to(dtype)
        compiled = tov.compile(lambda x: (x.mean(-1), x.cumsum(0)), options=OPTIONS)
        torch.testing.assert_close(compiled(x), (x.mean(-1), x.cumsum(0)))


@pytest.mark.parametrize("size", [75_002, 1_000_003])
def test_a_count_that_float16_does_not_have(size: int) -> None:
    for function in (
        lambda x: x.mean(0),
        lambda x: x.mean((0, 1), keepdim=True),
        lambda x: F.layer_norm(x.t(), (x.shape[0],), eps=1e-7),
        lambda x: F.layer_norm(x * 0, x.shape, eps=1e-9),
    ):
        x = (normal(size, 2) + 1).half()
        compiled = tov.compile(function, options=OPTIONS)
        torch.testing.assert_close(compiled(x), function(x), rtol=2e-3, atol=2e-3)
        assert compiled.report.summary.coverage == 1.0


def test_an_open_length_is_limited() -> None:
    compiled = check_digits(lambda x: (x + 50).mean(1), normal(2, 1000, 3), dynamic=True)
    x = normal(2, 300_000, 3)
    assert relative_error(compiled(x), (x.double() + 50).mean(1)) < 1e-6
    (fallback,) = compiled.report.fallbacks
    assert "sums over it" in fallback.reason and fallback.count == 1


def test_an_open_length_that_is_long_from_the_start_stays_in_eager() -> None:
    for function in (lambda x: (x + 50).mean(1), lambda x: (x + 50).var(1), lambda x: (x + 9).cumsum(1)):
        compiled = check_digits(function, normal(2, 300_000, 2), dynamic=True, coverage=None, most=1e-6)
        (fallback,) = compiled.report.fallbacks
        assert "open dimension" in fallback.reason


def test_the_last_dimension_may_be_open_and_long() -> None:
    for function in (lambda x: (x + 50).mean(-1), lambda x: (x + 50).var(), lambda x: (x + 50).norm()):
        compiled = check_digits(function, normal(2, 1000), dynamic=True)
        x = normal(3, MILLION)
        assert relative_error(compiled(x), function(x.double())) < 1e-4 and not compiled.report.fallbacks
    compiled = check_digits(lambda x: (x + 50).var(), normal(1000), dynamic=True)
    x = normal(3 * MILLION)
    assert relative_error(compiled(x), (x.double() + 50).var()) < 1e-4 and not compiled.report.fallbacks


def test_open_heights_and_widths_are_added_up_row_by_row() -> None:
    compiled = check_digits(lambda x: (x + 50).mean((2, 3)), normal(1, 3, 100, 100), dynamic=True)
    x = normal(1, 3, 700, 900)
    assert relative_error(compiled(x), (x.double() + 50).mean((2, 3))) < 1e-5
    assert not compiled.report.fallbacks


def test_the_position_in_a_grid_of_open_size_may_be_summed() -> None:
    """The features of a backbone are small, though height times width of the image is not."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, 32).flatten(2).mean(-1)

    check_digits(function, positive(1, 2, 320, 640), dynamic=True)


@pytest.mark.parametrize("shape", [(MILLION,), (2, MILLION), (4, 131_072), (499_807,)], ids=str)
def test_sums_that_cancel_keep_their_digits(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    compiled = tov.compile(lambda x: x.sum(-1), options=OPTIONS)
    # As much as eager PyTorch loses, or so: sums in few accumulators lose 5e-3 here.
    assert float((compiled(x).double() - x.double().sum(-1)).abs().max()) < 1e-3
    assert compiled.report.summary.coverage == 1.0
