"""Models and imports for TorchServe's own handlers, which are run as they are installed."""

import sys
import types
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

CLASSIFIER = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.last = torch.nn.Conv2d(3, 8, 7, 4), torch.nn.Linear(8, 6)
    def forward(self, x):
        return self.last(self.conv(x).relu().mean((2, 3)))
"""
SEGMENTER = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.aux = torch.nn.Conv2d(3, 5, 9, 8), torch.nn.Conv2d(3, 5, 1, 8)
    def forward(self, x):
        return {"out": self.conv(x), "aux": self.aux(x)}
"""
# A list of dictionaries for each image, as torchvision's detectors return, but always of the same size.
DETECTOR = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.last = torch.nn.Conv2d(3, 8, 7, 4), torch.nn.Linear(8, 4 * 6)
    def forward(self, images):
        found = self.last(self.conv(images).relu().mean((2, 3))).reshape(len(images), 4, 6)
        scores = found[..., 4].sigmoid()
        labels = torch.full(scores.shape, 2)
        return [{"boxes": found[i, :, :4], "labels": labels[i], "scores": scores[i]} for i in range(len(images))]
"""
TEXTS = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.fc = torch.nn.EmbeddingBag(20, 8), torch.nn.Linear(8, 4)
    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))
"""


def photo(seed: int) -> bytes:
    """Returns a PNG that the handlers' transforms resize and crop."""
    pixels = np.random.default_rng(seed).integers(0, 255, (9, 11, 3), dtype=np.uint8)
    buffer = BytesIO()
    Image.fromarray(pixels).resize((300, 260)).save(buffer, "PNG")
    return buffer.getvalue()


def vocabulary(path: Path, *texts: str) -> None:
    words = [word for text in texts for word in text.split()]
    pairs = [f"{a} {b}" for text in texts for a, b in zip(text.split(), text.split()[1:], strict=False)]
    torch.save({each: index for index, each in enumerate(dict.fromkeys(words + pairs))}, path)


class Explainer:
    """captum's attribution methods, reduced to a gradient."""

    def __init__(self, model: Any, layer: Any = None) -> None:
        self.model = model

    def attribute(self, inputs: torch.Tensor, target: int = 0, **_: Any) -> torch.Tensor:
        inputs = inputs.detach().requires_grad_()
        (found,) = torch.autograd.grad(self.model(inputs)[:, int(target)].sum(), inputs)
        return found


class Compose:
    """Runs transforms one after the other."""

    def __init__(self, steps: list[Callable[[Any], Any]]) -> None:
        self.steps = steps

    def __call__(self, value: Any) -> Any:
        for step in self.steps:
            value = step(value)
        return value


def _transforms() -> dict[str, Callable[..., Any]]:
    """Returns stand-ins for those transforms of torchvision that the handlers use."""

    def normalize(mean: list[float], std: list[float]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: (x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]

    return {
        "Compose": Compose,
        "Resize": lambda size: lambda image: image.resize((size, size)),
        "CenterCrop": lambda size: lambda image: image.crop((16, 16, 16 + size, 16 + size)),
        "ToTensor": lambda: lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255,
        "Normalize": normalize,
    }


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets TorchServe's handlers import what they need at the top, whether or not it is installed."""

    def module(name: str, **members: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    transforms = module("torchvision.transforms", **_transforms())
    module("torchvision", transforms=transforms, __version__="0.29.0")
    names = ("IntegratedGradients", "LayerIntegratedGradients", "TokenReferenceBase")
    module("captum", attr=module("captum.attr", **dict.fromkeys(names, Explainer)))
    before = set(sys.modules)
    yield
    # They were made with the stand-ins.
    for name in set(sys.modules) - before:
        if name.startswith("ts.torch_handler."):
            del sys.modules[name]
