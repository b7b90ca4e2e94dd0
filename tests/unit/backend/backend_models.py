"""Models for comparing each backend with eager PyTorch."""

import torch
from torch import nn
from torch.nn import functional


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3), nn.Softmax(-1)).eval()


def conv_net() -> nn.Module:
    body = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 8))
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()


class Attention(nn.Module):
    """Takes integer inputs by keyword; returns a dictionary that also holds a plain value."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, input: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, object]:
        x = self.embed(input)
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return {"y": self.out(found.transpose(1, 2).reshape(batch, length, width)), "heads": 4}


class OddOne(nn.Module):
    """Has an unsupported operator in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.digamma(x.relu() + 1) * 2


class Branch(nn.Module):
    """Has control flow that depends on a tensor value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x.relu() - 1


class Counting(nn.Module):
    """Keeps state in a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * 2 + self.seen


class Attributes(nn.Module):
    """Reads attributes that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift, self.items = 2.0, torch.ones(4), [torch.ones(4)]
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x) * self.scale + self.shift * self.items[0] + torch.tensor([1.0, 2.0, 3.0, 4.0])


def inputs(model: nn.Module, batch: int) -> dict[str, torch.Tensor]:
    """Returns the keyword arguments of a call."""
    if isinstance(model, Attention):
        return {"input": torch.randint(0, 20, (batch, 5))}
    first = next(model.children(), None)
    shape = (3, 8, 8) if isinstance(first, nn.Conv2d) else (first.in_features if isinstance(first, nn.Linear) else 4,)
    return {"input" if isinstance(model, nn.Sequential) else "x": torch.randn(batch, *shape)}


MODELS = {"mlp": mlp, "conv": conv_net, "attention": lambda: Attention().eval(), "odd": lambda: OddOne().eval()}
