"""A worker for a small diffusion pipeline in this process, and the pictures that diffusers makes by itself."""

import base64
import functools
import io
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from task_worker import Worker

from torchserve_openvino.tasks.pictures.handler import ImageGenerator

SIZES = ["32x32", "48x32"]


def started(place: Path, folder: Path, **section: Any) -> Worker:
    """Loads a worker; ``section`` is ``handler.openvino.image_generation``."""
    own = {"sizes": SIZES, "max_steps": 8, "default_steps": 3, "guided": "both", **section}
    openvino = {"image_generation": own, "fallback": {"allow": [], "on_violation": "refuse"}}
    return Worker(place / "archive", ImageGenerator, folder, openvino, batch_size=4)


def opened(data: bytes | str) -> Image.Image:
    """A picture from PNG, or from base64 of it."""
    return Image.open(io.BytesIO(base64.b64decode(data) if isinstance(data, str) else data))


def farthest(one: Image.Image, other: Image.Image) -> int:
    """The largest difference of two pictures, in 1/255."""
    assert one.size == other.size
    return int(np.abs(np.array(one.convert("RGB"), int) - np.array(other.convert("RGB"), int)).max())


def eager(folder: Path, kind: str, seed: int, **given: Any) -> Image.Image:
    """The picture that a pipeline of diffusers makes."""
    return eager_pipeline(folder, kind)(**given, generator=torch.Generator().manual_seed(seed)).images[0]


@functools.cache
def eager_pipeline(folder: Path, kind: str) -> Any:
    """A pipeline of diffusers, loaded once."""
    checks = not kind.startswith(("StableDiffusionXL", "StableDiffusion3"))
    without = {"feature_extractor": None, "safety_checker": None} if checks else {}
    if kind.startswith("StableDiffusion3") and not (folder / "text_encoder_3").exists():
        without = {"text_encoder_3": None, "tokenizer_3": None}
    pipe = getattr(diffusers, kind).from_pretrained(folder, **without)
    pipe.set_progress_bar_config(disable=True)
    return pipe
