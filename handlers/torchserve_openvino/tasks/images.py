"""Photos to tensors: decoding, and torchvision's classic transforms written with Pillow and NumPy.

torchvision is not needed: its `Resize`, `CenterCrop`, `ToTensor` and `Normalize` on a PIL image are a few formulas
(torchvision 0.28, transforms/functional.py and _functional_pil.py), and those are followed to the bit.
"""

import base64
import binascii
import io
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from torchserve_openvino.config.sections import ImageSection
from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError, UnsupportedMediaTypeError

FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "nearest": Image.Resampling.NEAREST,
}


def to_tensor(value: Any, section: ImageSection) -> torch.Tensor:
    """One request's picture to the model's input.

    Args:
        value: Encoded picture as bytes, or as base64 text (a data: URL as well), or nested lists: the ready tensor
            ``[3, crop, crop]`` in floats, as TorchServe's own image handlers take it.
        section: Sizes, limits and normalisation.

    Returns:
        float32 ``[3, crop, crop]``.

    Raises:
        PayloadTooLargeError: More bytes or pixels than allowed.
        UnsupportedMediaTypeError: No picture that Pillow reads.
        InvalidInputError: Anything else that is not a picture.
    """
    if isinstance(value, dict):
        value = value.get("data", value.get("b64"))
    if isinstance(value, str):
        value = _from_base64(value, section)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return transform(decode(bytes(value), section), section)
    if isinstance(value, list):
        return _from_lists(value, section)
    raise InvalidInputError(f"a picture must come as bytes, base64 text or nested lists, not {type(value).__name__}")


def decode(data: bytes, section: ImageSection) -> Image.Image:
    """Encoded bytes to an RGB picture; nothing is decoded before its size is known to be allowed."""
    if len(data) > section.max_bytes:
        raise PayloadTooLargeError(
            f"the picture has {len(data)} bytes, more than handler.openvino.image.max_bytes {section.max_bytes}"
        )
    try:
        picture = Image.open(io.BytesIO(data))
    except Image.DecompressionBombError as error:
        raise PayloadTooLargeError(f"the picture is too large: {error}") from error
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise UnsupportedMediaTypeError(
            f"the {len(data)} bytes are no picture that Pillow reads (JPEG, PNG, WebP and the like)"
        ) from error
    pixels = picture.width * picture.height
    if pixels > section.max_pixels:
        raise PayloadTooLargeError(
            f"the picture has {picture.width} x {picture.height} = {pixels} pixels, more than "
            f"handler.openvino.image.max_pixels {section.max_pixels}"
        )
    try:
        return picture.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise InvalidInputError(f"the picture is damaged: {error}") from error


def transform(picture: Image.Image, section: ImageSection) -> torch.Tensor:
    """Resize, CenterCrop, ToTensor, Normalize.

    Returns:
        float32 ``[3, crop, crop]``, contiguous.
    """
    picture = _center_crop(_resize(picture, section), section.crop)
    pixels = np.asarray(picture, dtype=np.uint8)
    # ToTensor divides in float32, Normalize subtracts and divides in float32: the same order, the same rounding.
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous().to(torch.float32).div(255)
    mean = torch.tensor(section.mean, dtype=torch.float32).view(3, 1, 1)
    std = torch.tensor(section.std, dtype=torch.float32).view(3, 1, 1)
    return tensor.sub_(mean).div_(std)


def _resize(picture: Image.Image, section: ImageSection) -> Image.Image:
    """torchvision's Resize(int): the shorter side becomes ``resize``, the longer ``int(resize * long / short)``."""
    width, height = picture.size
    short, long = min(width, height), max(width, height)
    other = int(section.resize * long / short)
    size = (section.resize, other) if width <= height else (other, section.resize)
    return picture if size == picture.size else picture.resize(size, FILTERS[section.interpolation])


def _center_crop(picture: Image.Image, crop: int) -> Image.Image:
    """torchvision's CenterCrop: pads with black where the picture is smaller, then rounds half to even."""
    width, height = picture.size
    if crop > width or crop > height:
        left, top = max(0, (crop - width) // 2), max(0, (crop - height) // 2)
        padded = Image.new("RGB", (max(crop, width), max(crop, height)))
        padded.paste(picture, (left, top))
        picture, (width, height) = padded, padded.size
    top, left = round((height - crop) / 2.0), round((width - crop) / 2.0)
    return picture.crop((left, top, left + crop, top + crop))


def _from_base64(text: str, section: ImageSection) -> bytes:
    payload = text.split(",", 1)[1] if text.startswith("data:") and "," in text else text
    # Four characters carry three bytes.
    if len(payload) * 3 // 4 > section.max_bytes + 2:
        raise PayloadTooLargeError(
            f"the picture has about {len(payload) * 3 // 4} bytes, more than handler.openvino.image.max_bytes "
            f"{section.max_bytes}"
        )
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInputError(f"the text is not base64 of a picture: {error}") from error


def _from_lists(value: list[Any], section: ImageSection) -> torch.Tensor:
    try:
        array = np.asarray(value, dtype=np.float32)
    except (ValueError, TypeError) as error:
        raise InvalidInputError(f"the lists are not a rectangular array of numbers: {error}") from error
    expected = (3, section.crop, section.crop)
    if array.shape != expected:
        raise InvalidInputError(f"the array has shape {list(array.shape)}; the model takes {list(expected)}")
    return torch.from_numpy(np.ascontiguousarray(array))
