"""The photos that every contender gets, with eager PyTorch's answers."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_efficientnet_mar import EXAMPLE

LABELS = EXAMPLE / "index_to_name.json"
# Part of scikit-image's wheel; its other photos would be downloaded.
NAMES = (
    "astronaut.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
)
QUALITY = 90


@dataclass(frozen=True)
class Photo:
    """One request.

    Attributes:
        data: JPEG, the same bytes for every contender.
        label: The class that eager PyTorch gives.
        margin: By how much its probability exceeds the second one's.
    """

    name: str
    data: bytes
    label: str
    margin: float


def top(body: bytes) -> str | None:
    """The most probable class of an answer, or the position of a vector's largest number; None for another form."""
    try:
        answer: dict[str, float] | list[float] = json.loads(body)
        if isinstance(answer, list):
            answer = {str(position): number for position, number in enumerate(answer)}
        return max(answer, key=answer.__getitem__)
    except (ValueError, TypeError, AttributeError):
        return None


def _jpegs() -> dict[str, bytes]:
    import skimage
    from PIL import Image

    # Not skimage.data's functions: they download what is absent.
    folder = Path(skimage.__file__).parent / "data"
    result = {}
    for name in NAMES:
        if (folder / name).exists():
            buffer = io.BytesIO()
            with Image.open(folder / name) as picture:
                picture.convert("RGB").save(buffer, format="JPEG", quality=QUALITY)
            result[Path(name).stem] = buffer.getvalue()
    if not result:
        raise RuntimeError("scikit-image is installed without its sample photos: install scikit-image>=0.24")
    return result


def load() -> list[Photo]:
    """Every photo with the answer of eager float32, batch 1."""
    import torch

    from benchmarks.models import efficientnet_lite0
    from torchserve_openvino.config.sections.task_sections import ImageSection
    from torchserve_openvino.tasks.picture_transforms import to_tensor

    labels: dict[str, Any] = json.loads(LABELS.read_text(encoding="utf-8"))
    module = efficientnet_lite0().module
    photos = []
    with torch.inference_mode():
        for name, data in _jpegs().items():
            probabilities = module(to_tensor(data, ImageSection())[None]).softmax(dim=1)[0]
            best, second = torch.topk(probabilities, 2).values.tolist()
            label = labels[str(int(probabilities.argmax()))]
            photos.append(Photo(name, data, label, best - second))
    return photos
