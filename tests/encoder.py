"""A small model for sequences of up to 16 tokens: one attention layer with an optional padding mask."""

from pathlib import Path
from typing import Any

import torch

ENCODER = """
import torch
class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.place = torch.nn.Embedding(16, 8)
        self.query, self.key, self.value = (torch.nn.Linear(8, 8) for _ in range(3))
        self.last = torch.nn.Linear(8, 3)
    def forward(self, ids, mask=None):
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 8 ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, :] == 0, float("-inf"))
        x = torch.softmax(scores, -1) @ self.value(x)
        kept = torch.ones_like(ids).float() if mask is None else mask.float()
        return {"hidden": x, "logits": self.last((x * kept[:, :, None]).sum(1) / kept.sum(1, keepdim=True))}
"""


# The encoder's inputs, as handler.openvino.warmup.inputs declares them.
IDS = {"name": "ids", "shape": ["sequence"], "dtype": "int64", "low": 0, "high": 50}
MASK = {"name": "mask", "shape": ["sequence"], "dtype": "int64", "mask": True}


def build(source: str, class_name: str) -> torch.nn.Module:
    """Returns a model of this class from the source of its module, with fixed weights."""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    torch.manual_seed(0)
    return namespace[class_name]().eval()


def encoder() -> torch.nn.Module:
    return build(ENCODER, "Encoder")


def save_encoder(path: Path) -> None:
    torch.save(encoder().state_dict(), path)
