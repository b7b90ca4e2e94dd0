"""TorchScript archives: loaded, compiled, verified and reported as any model, alone and beside a model file."""

import pytest
import torch
from serving_worker import NETWORK, ROWS, WARMUP, close, network
from torch import nn

from torchserve_openvino.errors import PolicyViolationError
from torchserve_openvino.serving.base import worker_of
from torchserve_openvino.tasks.tensor import TensorHandler


class Network(nn.Module):
    """The network of the other tests, in a file, which scripting needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes two layers."""
        return self.last(self.first(x).relu())


def saved(model: nn.Module, path) -> None:
    torch.jit.script(model.eval()).save(str(path))


def scripted(path) -> None:
    model = Network()
    model.load_state_dict(network().state_dict())
    saved(model, path)


def traced(path) -> None:
    torch.jit.trace(network(), torch.zeros(2, 4)).save(str(path))


@pytest.mark.parametrize("write", [scripted, traced])
@pytest.mark.parametrize("name", ["m.pt", "m.pth"])
def test_a_scripted_model_alone_runs_on_openvino(archive, write, name) -> None:
    made = archive(model_file=None, weights=write, weights_name=name)
    handler = TensorHandler()
    handler.initialize(made.context)
    close(made.handle(handler, ROWS)[0])
    report = worker_of(handler).report
    assert report.summary.coverage == 1.0 and report.summary.fallbacks == 0
    assert report.to_dict()["verify"]["passed"]
    assert isinstance(worker_of(handler).eager_model, torch.jit.ScriptModule)
