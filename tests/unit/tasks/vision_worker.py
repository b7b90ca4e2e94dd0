"""A worker for small vision models in this process, and pictures for it."""

import base64
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from task_worker import Worker

from hub_vision_models import vision_model
from torchserve_openvino.tasks.vision.classifier import HubImageClassifier
from torchserve_openvino.tasks.vision.depth import DepthEstimator
from torchserve_openvino.tasks.vision.detector import ObjectDetector
from torchserve_openvino.tasks.vision.embedder import ImageEmbedder
from torchserve_openvino.tasks.vision.segmenter import ImageSegmenter
from torchserve_openvino.tasks.vision.zero_shot import ZeroShotImageClassifier

HANDLERS = {
    each.task: each
    for each in (
        HubImageClassifier, ImageSegmenter, ObjectDetector, DepthEstimator, ZeroShotImageClassifier, ImageEmbedder,
    )
}  # fmt: skip


def photo(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A picture with coarse random colors, so that resizing does not turn it grey."""
    pixels = np.random.default_rng(seed).integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height)).convert(mode)


def encoded(picture: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **how)
    return buffer.getvalue()


def text(picture: Image.Image) -> str:
    return base64.b64encode(encoded(picture)).decode()


def asked(picture: Image.Image, **parameters: Any) -> dict[str, Any]:
    return {"inputs": text(picture), "parameters": parameters}


def unpacked(png: str) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(base64.b64decode(png)))).astype(np.int64))


PHOTOS = [photo(60, 40), photo(40, 75, 1), photo(130, 33, 2), photo(51, 50, 3)]


def started(place: Path, task: str, folder: Path, **openvino: Any) -> Worker:
    """Loads a worker for a saved model."""
    return Worker(place, HANDLERS[task], folder, {"batching": {"buckets": [4]}, **openvino})


def workers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Worker]:
    """Returns a function that returns the one worker of each task: loading one takes seconds."""

    @functools.cache
    def of(task: str) -> Worker:
        place = tmp_path_factory.mktemp(task)
        return started(place / "archive", task, vision_model(task, place / "saved"))

    return of


def near(value: Any) -> Any:
    return pytest.approx(value, abs=2e-3)


# Random weights are sure of nothing.
THRESHOLD = 0.15


def boxes_of(answer: list[dict[str, Any]]) -> list[tuple[str, float, list[float]]]:
    return [
        (next(name for name in each if name != "score"), each["score"], next(iter(each.values()))) for each in answer
    ]
