"""Model files as a user passes them to the doctor: ILL runs only partly on OpenVINO, WELL completely."""

from pathlib import Path

# Unsupported and custom operators, a decomposable one, a print and a data-dependent branch.
ILL = """
import torch
from torch import nn

@torch.library.custom_op("illlib::swishy", mutates_args=())
def swishy(x: torch.Tensor, beta: float = 1.0) -> torch.Tensor:
    return x * torch.sigmoid(beta * x)

@swishy.register_fake
def _(x, beta=1.0):
    return torch.empty_like(x)

class Ill(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        print("hello")
        if y.sum().item() > 1e9:
            y = y + 1
        y = swishy(y, 2.0)
        y = torch.hypot(y, y)
        z = torch.addmv(y[0], y.T @ y, y[0])
        return y + torch.linalg.det(y @ y.T), z

def model():
    torch.manual_seed(0)
    return Ill(), (torch.randn(3, 4),)
"""

# Lets OpenVINO also take partitions of one light operator, so that only unsupported operators are refused.
ANY_SIZE = "pt2: {compile: {options: {testing: true}}}\n"

WELL = """
import torch
from torch import nn

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

def example_inputs():
    return torch.randn(3, 4)
"""


def written(folder: Path, name: str, text: str) -> str:
    """Writes a file and returns its path."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)
