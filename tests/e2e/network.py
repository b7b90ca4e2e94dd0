"""A small network, as the source of a model file and in eager PyTorch."""

import torch

NETWORK = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
    def forward(self, x):
        return self.last(self.first(x).relu())
"""


def make_network() -> torch.nn.Module:
    """The network with fixed weights."""
    namespace: dict[str, type[torch.nn.Module]] = {}
    exec(NETWORK, namespace)
    torch.manual_seed(0)
    return namespace["Network"]().eval()
