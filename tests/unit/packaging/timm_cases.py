"""Packages and serves timm models, and prints what came of it as JSON.

A program of its own: it replaces torchvision, whose wheels need not fit the installed torch. timm imports torchvision
for its training transforms; its models do not use it.
"""

import importlib.machinery
import json
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file
from serving_worker import Archive
from typer.testing import CliRunner

from torchserve_openvino.cli import app
from torchserve_openvino.config.sections.task_sections import ImageSection
from torchserve_openvino.tasks.image_classifier import ImageClassifier
from torchserve_openvino.tasks.picture_transforms import to_tensor


class Replaced:
    """Finds torchvision and all its modules as mocks."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        inside = name == "torchvision" or name.startswith("torchvision.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: Any) -> None:
        pass


NAME = "test_vit"


def package(place: Path, weights: Path, *more: str, name: str = NAME) -> Any:
    command = ["package", "--timm", name, "--weights", str(weights), "--export-path", str(place), *more]
    return CliRunner().invoke(app, command)


def served(place: Path, folder: Path, photo: bytes) -> tuple[dict[str, float], Any, dict[str, Any]]:
    """Unpacks the archive and answers a photo; returns answer, report and configuration."""
    with zipfile.ZipFile(place / f"{NAME}.mar") as archive:
        archive.extractall(folder)
    config = yaml.safe_load((folder / "model-config.yaml").read_text())
    # Archive gives the model file a name of its own, since Python imports each name once.
    sys.path.insert(0, str(folder))
    made = Archive(folder, config, (folder / "model.py").read_text())
    made.manifest["model"]["serializedFile"] = "weights.safetensors"
    handler = ImageClassifier()
    handler.initialize(made.context)
    (answer,) = made.handle(handler, photo)
    return answer, handler.describe_handle(), config


def main(place: Path) -> dict[str, Any]:
    import timm

    torch.manual_seed(0)
    model = timm.create_model(NAME, num_classes=7).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    good, bad, other = place / "good.safetensors", place / "bad.pth", place / "other.pth"
    save_file(model.state_dict(), good)
    bad.write_bytes(b"no weights")
    torch.save({"state_dict": {"patch_embed.proj.weight": torch.zeros(2), "extra": torch.zeros(1)}}, other)
    pixels = np.random.default_rng(0).integers(0, 256, (300, 200, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((400, 300)).save(place / "photo.png")
    photo = (place / "photo.png").read_bytes()
    done = package(place, good)
    answer, report, config = served(place, place / "unpacked", photo)
    section = ImageSection(**config["handler"]["openvino"]["image"])
    with torch.inference_mode():
        expected = model(to_tensor(photo, section)[None]).softmax(1)[0].topk(5)
    mine = place / "mine.yaml"
    mine.write_text(yaml.safe_dump({**config, "handler": {"openvino": {"image": {"top_k": 2, "resize": 170}}}}))
    again = package(place, good, "--config-file", str(mine), "--force")
    _, _, kept = served(place, place / "again", photo)
    refused = {
        "damaged": package(place, bad, "--force"),
        "of another model": package(place, other, "--force"),
        "unknown": package(place, good, name="test_vitt"),
        "with a handler": package(place, good, "--handler", "tensor", "--force"),
    }
    return {
        "codes": [done.exit_code, again.exit_code],
        "output": done.output + again.output,
        "image": config["handler"]["openvino"]["image"],
        "timm": timm.data.resolve_model_data_config(model),
        "kept": kept["handler"]["openvino"]["image"],
        "answer": answer,
        "expected": dict(zip(map(str, expected.indices.tolist()), expected.values.tolist(), strict=True)),
        "coverage": report["summary"]["coverage"],
        "verified": report["verify"]["passed"],
        "refused": {name: [result.exit_code, result.output] for name, result in refused.items()},
    }


if __name__ == "__main__":
    sys.meta_path.insert(0, Replaced())
    (Path(sys.argv[1]) / "result.json").write_text(json.dumps(main(Path(sys.argv[1]))))
