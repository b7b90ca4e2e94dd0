"""Runs OpenVINO's own backend on a small model, in a separate process: MODEL OPTIONS_JSON ANSWER_FILE."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from torchserve_openvino.doctor.bisecting.stock_worker import run_stock
from torchserve_openvino.doctor.target import SampleCall


class WithDigamma(nn.Module):
    """Has an operator that OpenVINO lacks, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.digamma(torch.relu(self.first(x)) + 2)))


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "conv": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval(),
        torch.randn(2, 3, 8, 8),
    ),
    "digamma": lambda: (WithDigamma().eval(), torch.randn(2, 8)),
}

if __name__ == "__main__":
    name, options, answer = sys.argv[1:]
    torch.manual_seed(0)
    model, x = MODELS[name]()
    Path(answer).write_text(json.dumps(run_stock(model, SampleCall((x,), {}), json.loads(options))), encoding="utf-8")
