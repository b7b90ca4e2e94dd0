"""Parts of a model that depend on no input, made by operators that OpenVINO does not fold into constants."""

import pytest
import torch
from torch.nn import functional as F

import torchserve_openvino as tov

MADE = {
    "rolled": lambda c: c.roll(1, 0),
    "gathered": lambda c: c.gather(1, torch.tensor([[3, 0, 1, 2]] * 3)),
    "pooled": lambda c: F.avg_pool1d(c[None], 3, 1, 1)[0],
    "convolved": lambda c: F.conv1d(c[None], torch.ones(3, 3, 1))[0],
    "a row": lambda c: c.reshape(-1).abs().reshape(3, 4),
    "sorted": lambda c: c.sort(-1)[0],
    "normalized": lambda c: F.layer_norm(c, (4,)),
    "resized": lambda c: F.interpolate(c[None, None], (3, 4), mode="bilinear")[0, 0],
}
USED = {
    "added to": lambda c, x: x.relu() + c,
    "subtracted from": lambda c, x: c.relu() - x,
    "returned too": lambda c, x: (c, x * c),
}


def positions() -> torch.Tensor:
    return torch.linspace(-1, 2, 12).reshape(3, 4)


@pytest.mark.quick(dynamic=[False], backend=["openvino"])
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("use", USED)
@pytest.mark.parametrize("name", MADE)
def test_a_part_that_depends_on_no_input(name, use, dynamic, backend) -> None:
    """From the second inference on the plugin had overwritten it."""

    def model(x: torch.Tensor) -> object:
        return USED[use](MADE[name](positions()), x)

    compiled = tov.compile(model, backend=backend, dynamic=dynamic, options={"min_partition_us": 0})
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 4)
            torch.testing.assert_close(compiled(x), model(x))
    assert compiled.report.summary.ops_on_openvino


class Positions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() + self.weight.roll(1, 0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_part_that_depends_on_a_weight(dynamic) -> None:
    model = Positions().eval()
    compiled = tov.compile(model, dynamic=dynamic, options={"min_partition_us": 0})
    with torch.no_grad():
        for change in (0.0, 0.0, 1.0, 0.0):
            model.weight.add_(change)
            x = torch.randn(3, 4)
            torch.testing.assert_close(compiled(x), model(x))
    assert not compiled.report.fallbacks


def test_a_part_of_a_known_shape_alone() -> None:
    compiled = tov.compile(lambda x: torch.pow(torch.full_like(x, -1.5).abs(), x), options={"min_partition_us": 0})
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(5)
            torch.testing.assert_close(compiled(x), torch.pow(torch.full_like(x, 1.5), x))
    assert compiled.report.summary.coverage == 1.0
