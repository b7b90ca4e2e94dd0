"""A small network that is trained on scikit-learn's digits, and the pictures."""

import functools
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

# Pictures from here on are held out.
TRAINED = 1200
CODE = """
from torch import nn


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
        )

    def forward(self, x):
        return self.body(x)
"""


@functools.cache
def pictures() -> tuple[Tensor, Tensor]:
    """Returns float32 [items, 1, 8, 8] in 0..1, and the digits, int64 [items]."""
    found = load_digits()
    return torch.from_numpy(found.images).float()[:, None] / 16, torch.from_numpy(found.target)


@functools.cache
def trained() -> nn.Module:
    """Returns the network: two convolutions and two linear layers."""
    names: dict[str, type[nn.Module]] = {}
    exec(CODE, names)
    images, labels = (each[:TRAINED] for each in pictures())
    torch.manual_seed(0)
    model = names["Digits"]()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(12):
        for batch in torch.randperm(TRAINED).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def requests(folder: Path, first: int, count: int) -> dict[str, int]:
    """Writes pictures as .npy files, float32 [1, 1, 8, 8], and returns the digit of each by file name."""
    folder.mkdir()
    images, labels = pictures()
    for number in range(first, first + count):
        np.save(folder / f"{number}.npy", images[number : number + 1].numpy())
    return {f"{number}.npy": int(labels[number]) for number in range(first, first + count)}
