"""A small network, as the source of a model file and in eager PyTorch, and its YAML on hosts other than TorchServe."""

import socket

import torch

from encoder import build

NETWORK = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
    def forward(self, x):
        return self.last(self.first(x).relu())
"""

CONFIG = """
batchSize: 4
maxBatchDelay: 10
responseTimeout: 60
pt2: {compile: {enable: true, backend: openvino, options: {config: {INFERENCE_PRECISION_HINT: f32}}}}
handler: {openvino: {warmup: {inputs: [{shape: [4]}]}}}
"""


def make_network() -> torch.nn.Module:
    """The network with fixed weights."""
    return build(NETWORK, "Network")


def free_port() -> int:
    """A port of the loopback interface that nothing uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
