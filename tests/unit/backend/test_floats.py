"""Python floats of a model with dynamic shapes: constants, until one of them changes."""

import torch
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same, check


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.eps = 1e-6
        self.scale = 1.5

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        x = self.layer(x) * self.scale * factor
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def test_floats_are_constants_with_dynamic_shapes() -> None:
    model = Scaled().eval()
    compiled = check(model, torch.randn(2, 257, 256), dynamic=True)
    check(model, torch.randn(3, 500, 256), compiled=compiled)
    assert compiled.report.summary.graphs == 1 and compiled.report.summary.partitions == 1


def test_a_float_that_changes_is_recompiled_once() -> None:
    model = Scaled().eval()
    compiled = tov.compile(model, dynamic=True)
    with torch.no_grad():
        for i in range(8):
            model.scale = 1.5 + 0.37 * i
            x, factor = torch.randn(2 + i, 33, 256), 0.25 + i
            assert_same(compiled(x, factor), model(x, factor))
    assert compiled.report.summary.recompiles == 1 and compiled.report.summary.graphs == 2
    # The float that did not change is still a constant; each of the others is cast twice in eager PyTorch.
    assert compiled.report.fallback_counts() == {"unsupported_op": 4}, compiled.report.to_text()


def test_another_model_of_the_same_class_has_its_own_floats() -> None:
    """Dynamo compares the values of all models that share their code."""
    for scale in (1.0, 2.0, 3.0):
        model = Scaled().eval()
        model.scale = scale
        check(model, torch.randn(2, 33, 256), dynamic=True)
