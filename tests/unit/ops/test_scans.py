"""Cumulative sums, k-th values, medians and products; no dtype changes between operators."""

import math

import pytest
import torch

import torchserve_openvino as tov
from helpers import replace_rule
from torchserve_openvino.ops.rule_registry import Rule

OPTIONS = {"min_partition_us": 0}
TYPES = [torch.float32, torch.float16, torch.int64, torch.int32]


def both(function, *inputs, **how):
    compiled = tov.compile(function, options=OPTIONS, **how)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), function(*inputs), rtol=0, atol=0)
    return compiled.report


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int8, torch.int32])
def test_a_running_sum_of_narrow_integers_is_int64(kind, backend) -> None:
    x = torch.ones(5, 4).to(kind)
    for function in (
        lambda x: torch.cumsum(x, 0) * torch.cumsum(x, 0),
        lambda x: torch.cumsum(x, -1) * 100,
        lambda x: torch.cumsum(x, 0, dtype=torch.float32) / 3,
    ):
        assert both(function, x, backend=backend).summary.coverage == 1.0


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("wanted", [torch.int32, torch.int64, torch.float32])
def test_a_running_sum_has_the_type_that_it_is_asked_for(wanted, backend) -> None:
    x = torch.full((5, 4), 2, dtype=torch.int32)
    for function in (
        lambda x: torch.cumsum(x, 0, dtype=wanted),
        lambda x: torch.cumsum(x, 0, dtype=wanted) * 2**28,
    ):
        both(function, x, backend=backend)


def test_an_operator_whose_type_the_frontend_changes_is_refused(monkeypatch) -> None:
    replace_rule(monkeypatch, "aten.cumsum.default", Rule())
    report = both(lambda x: torch.cumsum(x, 0) * torch.cumsum(x, 0), torch.ones(4, 2, dtype=torch.bool))
    (fallback,) = report.fallbacks
    assert fallback.op == "aten.cumsum.default" and "in OpenVINO" in fallback.reason


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("kind", TYPES)
def test_kthvalue_and_median(kind, backend) -> None:
    x = (torch.randperm(30).reshape(5, 6) - 13).to(kind)
    for function in (
        lambda x: tuple(torch.kthvalue(x, 2, 1)) + tuple(x.kthvalue(5, 0, True)),
        lambda x: (*x.median(1), *x.median(0, True), x.median(), x[0].median()),
    ):
        assert both(function, x, backend=backend).summary.coverage == 1.0


def test_median_of_nan_is_nan() -> None:
    compiled = tov.compile(lambda x: x.median(1)[0] + 1, options=OPTIONS)
    x = torch.tensor([[1.0, float("nan"), 3.0], [4.0, 5.0, 6.0]])
    torch.testing.assert_close(compiled(x), torch.tensor([float("nan"), 6.0]), equal_nan=True)


BIG, SMALL = [1e30, 1e30, 1e-30, 1e-30], [1e-30, 1e-30, 1e30, 1e30]
PRODUCTS = {
    "over and back": ([BIG, SMALL, [1.0, 2.0, 3.0, 4.0]], 1),
    "a zero among large numbers": ([[0.0, *BIG[:2], 1.0], [*BIG[:2], 0.0, 1.0], [1.0, -0.0, 1.0, 1.0]], 1),
    "not a number": ([[math.nan, 1.0, 2.0, 3.0]] * 3, 0),
    "infinite": ([[math.inf, -1.0, 2.0, 3.0]] * 3, 1),
    "vanishing": ([[1e-20, 1e-20, 1e-20, 2.0]] * 3, 1),
    "vanishing in every order": ([[1e-20, -1e-20, 1e-20, 1.0]] * 3, 0),
    "a zero among small numbers": ([[1e-20, 1e-20, 1e-20, 0.0]] * 3, 0),
    "plain": ([[0.5, -1.5, 2.0, 3.0]] * 3, 0),
}


@pytest.mark.quick(backend=["openvino"], dynamic=[False])
@pytest.mark.parametrize(("backend", "dynamic"), [("openvino", False), ("openvino", True), ("openvino_ts", False)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_whose_factors_order_matters_runs_in_eager(name, backend, dynamic) -> None:
    values, calls_in_eager = PRODUCTS[name]
    for function in (lambda x: x.prod(1), lambda x: x.prod(-1, keepdim=True) + 1, lambda x: x.prod()):
        compiled = tov.compile(function, backend=backend, dynamic=dynamic, options=OPTIONS)
        x = torch.tensor(values)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), function(x), equal_nan=True)
        assert sum(fallback.count for fallback in compiled.report.fallbacks) == calls_in_eager


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_long_running_sum_of_narrow_floats_is_added_up_in_float32(kind, dynamic) -> None:
    x = torch.rand(2, 3000).to(kind)
    compiled = tov.compile(lambda x: x.cumsum(-1), options=OPTIONS, dynamic=dynamic)
    torch.testing.assert_close(compiled(x), x.cumsum(-1), rtol=1e-2, atol=0)
    assert compiled.report.summary.coverage == 1.0


def test_group_normalization_of_bfloat16_runs_on_openvino() -> None:
    norm, x = torch.nn.GroupNorm(8, 32).eval().bfloat16(), torch.randn(2, 32, 9, 9).bfloat16()
    compiled = tov.compile(norm, options=OPTIONS)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), norm(x), rtol=2e-2, atol=2e-2)
    assert compiled.report.summary.coverage == 1.0


def test_products_of_many_numbers_run_in_eager() -> None:
    """torch multiplies in float64; 25,000 factors close to 1 would lose four digits in float32."""
    x = 1 + torch.randn(24_896) * 1e-4
    compiled = tov.compile(lambda x: x.cumprod(0) + 1, options=OPTIONS)
    torch.testing.assert_close(compiled(x), x.cumprod(0) + 1, rtol=1e-6, atol=1e-6)
    assert [each.op for each in compiled.report.fallbacks] == ["aten.cumprod.default"]
