"""A model at which OpenVINO's compiler dies, and a handler without what avoids it (tests/contract/test_openvino.py)."""

MODEL = """
import torch

class Deadly(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))

    def forward(self, x):
        h = x.reshape(-1, 16).exp()
        return (h + torch.tanh(self.layers(h))).reshape(x.shape)
"""
HANDLER = """
from torchserve_openvino.backend.runtime import build
from torchserve_openvino.tasks.tensor import TensorHandler

build._crashes = lambda model, device: ""

class Handler(TensorHandler):
    pass
"""
