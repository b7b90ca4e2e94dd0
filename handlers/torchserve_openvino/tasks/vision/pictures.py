"""Encodes maps of numbers as PNG in base64, for JSON answers."""

import base64
import io

import numpy as np
import torch
from PIL import Image


def png(numbers: torch.Tensor) -> str:
    """Returns a greyscale PNG of integers ``[height, width]``, of 8 bits where they fit, otherwise of 16."""
    array = numbers.numpy()
    kind = np.uint8 if array.size == 0 or int(array.max()) < 256 else np.uint16
    buffer = io.BytesIO()
    Image.fromarray(array.astype(kind)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode("ascii")
