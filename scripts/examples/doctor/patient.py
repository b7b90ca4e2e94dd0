"""A model with several problems for `torchserve-openvino doctor` to explain.

Three operators that OpenVINO does not know, a graph break, and, with patient.yaml, a mapping that builds the wrong
formula. See docs/doctor.md.
"""

import torch
from torch import Tensor, nn


@torch.library.custom_op("patient::swish", mutates_args=())
def swish(x: Tensor, beta: float = 1.0) -> Tensor:
    return x * torch.sigmoid(beta * x)


@torch.library.custom_op("patient::soft_clip", mutates_args=())
def soft_clip(x: Tensor, limit: float) -> Tensor:
    return limit * torch.tanh(x / limit)


@torch.library.custom_op("patient::unit", mutates_args=())
def unit(x: Tensor) -> Tensor:
    return x / (x * x).sum(-1, keepdim=True).sqrt()


swish.register_fake(lambda x, beta=1.0: torch.empty_like(x))
soft_clip.register_fake(lambda x, limit: torch.empty_like(x))
unit.register_fake(torch.empty_like)


class Patient(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.ops.patient.swish(self.first(x), 1.5)
        if x.mean() > 10:
            x = x / 10
        x = torch.ops.patient.soft_clip(self.second(x), 3.0)
        return self.last(nn.functional.hardtanh(torch.ops.patient.unit(x), -0.1, 0.1))


def model() -> tuple[nn.Module, tuple[Tensor]]:
    """The function that doctor calls: returns the model and one call's inputs."""
    torch.manual_seed(0)
    return Patient().eval(), (torch.randn(8, 16),)
