"""A PReLU is one operator of OpenVINO, in the kernel of the convolution before it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from openvino import opset15 as ops
from torch import Tensor, nn

import torchserve_openvino as tov
from helpers import check
from torchserve_openvino.passes.ov.slopes import join_slopes
from torchserve_openvino.passes.pass_context import PassContext

SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 3e38, -3e38])


def with_slopes(*slopes: float, channels: int = 4) -> nn.PReLU:
    layer = nn.PReLU(channels if len(slopes) != 1 else 1)
    layer.weight.data = torch.tensor(slopes or [0.25, -0.5, 0.0, 1.5])
    return layer.eval()


class Behind(nn.Module):
    """A PReLU between a convolution and what follows it."""

    def __init__(self, layer: nn.Module, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.layer, self.after = nn.Conv2d(3, 4, 3), layer, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.conv(x)))


def kernels(compiled: tov.CompiledModule) -> set[str]:
    (graph,) = compiled.report.to_dict()["graphs"]
    (partition,) = graph["partitions"]
    return {each["kind"] for each in partition["kernels"]}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("slopes", [(), (0.2,), (0.1, 0.2, 0.3, 0.4)], ids=["both signs", "one", "positive"])
@pytest.mark.parametrize(
    "after",
    [
        lambda x: nn.functional.avg_pool2d(x, 2),
        lambda x: x * torch.tensor([-1.0, 2.0, -3.0, 0.5])[:, None, None],
        lambda x: x + x.flip(0),
        lambda x: nn.functional.layer_norm(x, x.shape[1:]),
        nn.functional.relu,
    ],
    ids=["pool", "scale", "sum", "norm", "relu"],
)
def test_it_is_right_behind_a_convolution(slopes: tuple[float, ...], after: Any, dynamic: bool) -> None:
    model = Behind(with_slopes(*slopes), after).eval()
    compiled = check(model, torch.randn(2, 3, 24, 24), dynamic=dynamic or None)
    check(model, torch.randn(2, 3, 24, 24) * 10, compiled=compiled)
    if dynamic:
        check(model, torch.randn(5, 3, 17, 31), compiled=compiled)


def test_it_runs_in_the_kernel_of_the_convolution() -> None:
    model = Behind(with_slopes(), lambda x: nn.functional.avg_pool2d(x, 2)).eval()
    assert "Subgraph" not in kernels(check(model, torch.randn(2, 3, 24, 24)))


@pytest.mark.parametrize(
    "slopes",
    [(), (0.2,), (-0.2,), (0.1, 0.0, 0.3, 0.4), (math.inf, 0.1, -math.inf, math.nan), (-0.0,)],
    ids=["both signs", "one", "negative", "positive", "infinite", "negative zero"],
)
def test_special_values_and_their_signs(slopes: tuple[float, ...]) -> None:
    layer = with_slopes(*slopes)
    x = SPECIAL.repeat(2, 4, 1)
    for model in (layer, lambda x: 1 / layer(x), lambda x: layer(x).abs()):
        compiled = tov.compile(model, dynamic=False)
        with torch.no_grad():
            expected, got = model(x), compiled(x)
        torch.testing.assert_close(got, expected, equal_nan=True)
        assert torch.equal(got.nan_to_num().signbit(), expected.nan_to_num().signbit())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats(dtype: torch.dtype) -> None:
    check(Behind(with_slopes(), torch.neg).eval().to(dtype), torch.randn(2, 3, 12, 12, dtype=dtype))


def test_gradients() -> None:
    model = Behind(with_slopes(), torch.tanh)
    compiled = tov.compile(model, dynamic=False)
    x = torch.randn(2, 3, 12, 12)
    wanted, got = (torch.autograd.grad(each(x).sum(), list(model.parameters())) for each in (model, compiled))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


FORMS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, slope: torch.where(x > 0, x, slope * x),
    lambda x, slope: torch.where(x >= 0, x, x * slope),
    lambda x, slope: torch.where(x < 0, slope * x, x),
    lambda x, slope: torch.where(x <= 0, x * slope, x),
    # These are no PReLU.
    lambda x, slope: torch.where(x > 0, slope * x, x),
    lambda x, slope: torch.where(x > 1, x, slope * x),
    lambda x, slope: torch.where(x > 0, x, slope * x.abs()),
    lambda x, slope: torch.where(x > 0, x, x * x),
    lambda x, slope: torch.where(slope * x > 0, x, slope * x),
]


@pytest.mark.parametrize(
    "shape", [(), (1,), (4, 1, 1), (1, 4, 1, 1), (5,), (6, 1), (4, 6, 5), (2, 1, 1, 1), (3, 1, 4, 1, 1)]
)
@pytest.mark.parametrize("form", range(len(FORMS)))
def test_whatever_is_written_by_hand(form: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(form)
    slope = torch.randn(shape)
    check(lambda x: FORMS[form](x.sin(), slope).cos(), torch.randn(2, 4, 6, 5) * 3)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    slopes=st.lists(st.integers(0, 3), min_size=0, max_size=5),
    seed=st.integers(0, 99),
)
def test_only_slopes_along_the_second_dimension_are_joined(sizes: list[int], slopes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    # As broadcasting has it: 1 or the size of the dimension, or of one that is 1 in the value.
    shape = [1 if each == 0 else (sizes[-1 - i] if i < len(sizes) else each) for i, each in enumerate(slopes)][::-1]
    x, slope = random.standard_normal(sizes).astype(np.float32), random.standard_normal(shape).astype(np.float32)
    parameter = ops.parameter(sizes, ov.Type.f32)
    product = ops.multiply(ops.constant(slope), parameter)
    selected = ops.select(ops.greater(parameter, ops.constant(np.float32(0))), parameter, product)
    model = ov.Model([ops.abs(selected)], [parameter])
    join_slopes(model, PassContext())
    got = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([x])[0]
    np.testing.assert_allclose(got, np.abs(np.where(x > 0, x, slope * x)), rtol=1e-6)
    joined = "PRelu" in {each.get_type_name() for each in model.get_ops()}
    aligned = [1] * (len(sizes) - len(shape)) + shape
    assert joined == (len(shape) <= len(sizes) and all(n == 1 for i, n in enumerate(aligned) if i != 1))


@pytest.mark.parametrize("sizes", [(2, 8), (2, 8, 8), (8, 8)])
def test_slopes_between_a_product_and_a_softmax_stay_those_of_channels(sizes: tuple[int, ...]) -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))
            self.rectify = nn.PReLU(8)
            self.rectify.weight.data = torch.linspace(0.1, 0.9, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.rectify(x @ self.weight).softmax(-1)

    check(Scores().eval(), torch.randn(*sizes[:-1], 4))


def test_a_norm_of_a_batch_before_a_softmax_runs_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Softmax(-1)).eval()
    check(model, torch.randn(4, 8), options={"min_partition_us": 0})
