"""Angles, running sums and differences of logarithms keep their digits where OpenVINO computes in bfloat16."""

from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from openvino import opset15 as ops
from torch import Tensor, nn

import torchserve_openvino as tov
from torchserve_openvino.passes.ov.precise_values import keep_sensitive_values
from torchserve_openvino.passes.pass_context import PassContext

OPTIONS: dict[str, Any] = {"precision": "bf16", "min_partition_us": 0}
WIDTH = 16


class Model(nn.Module):
    """Products on both sides, since OpenVINO computes in bfloat16 between products alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.behind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.between(x, torch.nn.functional.softplus(self.before(x))))

    def between(self, x: Tensor, positive: Tensor) -> Tensor:
        raise NotImplementedError


class RunningSum(Model):
    def between(self, x: Tensor, positive: Tensor) -> Tensor:
        counted = (positive > -1).float().cumsum(1)
        return counted / counted[:, -1:] * positive


class RunningAngles(Model):
    """As detectors of the family of DETR embed positions."""

    def between(self, x: Tensor, positive: Tensor) -> Tensor:
        counted = (positive > -1).float().cumsum(1)
        return (counted / (counted[:, -1:] + 1e-6) * 6.28 * torch.arange(1, WIDTH + 1)).sin()


class Decays(Model):
    """As state space models and linear attention compute what a token still counts at the end."""

    def between(self, x: Tensor, positive: Tensor) -> Tensor:
        logarithms = (-8 * positive).cumsum(1)
        return x * (logarithms[:, -1:] - logarithms).exp()


class Pairs(Model):
    def between(self, x: Tensor, positive: Tensor) -> Tensor:
        logarithms = (-8 * positive).cumsum(1).transpose(1, 2)
        pairs = logarithms[..., :, None] - logarithms[..., None, :]
        late = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return (pairs.masked_fill(late, -torch.inf).exp() @ x.transpose(1, 2)[..., None])[..., 0].transpose(1, 2)


def compare(model: nn.Module, dynamic: bool) -> None:
    compiled = tov.compile(model.eval(), dynamic=dynamic, options=OPTIONS)
    with torch.no_grad():
        for length in (40, 600):
            x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length))
            expected = model(x)
            # Products round to 8 bits; where the others did too, the difference was 0.05 to 0.9.
            torch.testing.assert_close(compiled(x), expected, rtol=0, atol=0.02 * float(expected.abs().max()))
    assert compiled.report.summary.coverage == 1.0


@pytest.mark.parametrize("kind", [RunningSum, RunningAngles, Decays, Pairs])
def test_digits_that_bfloat16_does_not_have(kind: type[Model]) -> None:
    compare(kind(), dynamic=False)


def test_a_running_sum_of_open_length() -> None:
    compare(RunningSum(), dynamic=True)


class Scan(nn.Module):
    """The end of a chunk of linear attention, whose logarithms come from another partition."""

    def forward(self, x: Tensor, logarithms: Tensor) -> Tensor:
        late = x * (logarithms[..., -1:] - logarithms).exp()[..., None]
        return late.transpose(-1, -2) @ x


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_difference_of_logarithms_that_are_given(dynamic: bool) -> None:
    compiled = tov.compile(Scan(), dynamic=dynamic, options=OPTIONS)
    for rows in (2, 3):
        generator = torch.Generator().manual_seed(rows)
        x, steps = torch.randn(rows, 4, 64, WIDTH, generator=generator), torch.rand(rows, 4, 64, generator=generator)
        logarithms = (-50 * steps).cumsum(-1)
        for tensor in (x, logarithms):
            for dim in (1, 2, 3)[: tensor.dim() - 1]:
                torch._dynamo.mark_static(tensor, dim)
        # It was 8 times the largest value.
        expected = Scan()(x, logarithms)
        torch.testing.assert_close(compiled(x, logarithms), expected, rtol=0, atol=0.02 * float(expected.abs().max()))


def test_a_number_of_more_dimensions_gives_them_to_the_result() -> None:
    first, second = ops.parameter([6], ov.Type.f32), ops.parameter([6], ov.Type.f32)
    number = ops.constant(np.full((1, 1, 1), 0.5, np.float32))
    model = ov.Model([ops.exp(ops.multiply(ops.subtract(first, second), number))], [first, second])
    keep_sensitive_values(model, PassContext())
    model.validate_nodes_and_infer_types()
    assert list(model.output(0).shape) == [1, 1, 6]
