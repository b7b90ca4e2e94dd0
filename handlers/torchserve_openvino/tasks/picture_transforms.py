"""Converts photos to tensors: decoding, and torchvision's classic transforms written with Pillow and NumPy.

torchvision is not needed: its `Resize`, `CenterCrop`, `ToTensor` and `Normalize` on a PIL image are a few formulas
(torchvision 0.28, transforms/functional.py and _functional_pil.py), which are reproduced bit for bit.
"""

import contextlib
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn

from torchserve_openvino.config.sections.task_sections import ImageSection
from torchserve_openvino.config.spelling import listed
from torchserve_openvino.errors import InvalidInputError, ItemError, PayloadTooLargeError, UnsupportedMediaTypeError
from torchserve_openvino.serving.requests.json_body import array_of
from torchserve_openvino.tasks.payloads import from_base64

FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "nearest": Image.Resampling.NEAREST,
}


def warm(section: ImageSection) -> None:
    """Decodes a JPEG and a PNG, so that no request waits until Pillow has loaded its codecs and filters."""
    for kind in ("JPEG", "PNG"):
        buffer = io.BytesIO()
        Image.linear_gradient("L").convert("RGB").resize((640, 480)).save(buffer, format=kind)
        # The settings may refuse a format, or the size: the codec has run all the same.
        with contextlib.suppress(ItemError):
            to_tensor(buffer.getvalue(), section)


def to_tensor(value: Any, section: ImageSection) -> torch.Tensor:
    """Converts one request's picture to the model's input.

    Args:
        value: Encoded picture as bytes or as base64 text (a data: URL as well), or nested lists: the preprocessed
            float tensor ``[3, crop, crop]``, as TorchServe's own image handlers accept it.
        section: Sizes, limits and normalization.

    Returns:
        float32 ``[3, crop, crop]``; with ``fold`` the pixels as they are, uint8 ``[crop, crop, 3]``.

    Raises:
        PayloadTooLargeError: More bytes or pixels than allowed.
        UnsupportedMediaTypeError: Not a picture that Pillow can read.
        InvalidInputError: Anything else that is not a picture.
    """
    if isinstance(value, dict):
        value = value.get("data", value.get("b64"))
    if isinstance(value, str):
        value = from_base64(value, what="picture", max_bytes=section.max_bytes, key="handler.openvino.image.max_bytes")
    if isinstance(value, (bytes, bytearray, memoryview)):
        picture = decode(bytes(value), section)
        return crop_pixels(picture, section) if section.fold else transform(picture, section)
    if isinstance(value, list):
        if section.fold:
            raise InvalidInputError("this model takes photos only, not tensors: handler.openvino.image.fold is true")
        return _from_lists(value, section)
    raise InvalidInputError(f"a picture must come as bytes, base64 text or nested lists, not {type(value).__name__}")


def picture_of(value: Any, section: ImageSection) -> Image.Image:
    """Decodes one picture, and turns it as its EXIF data say, as transformers' pipelines do.

    Args:
        value: Encoded picture as bytes or as base64 text, a data: URL as well.
        section: Limits.

    Raises:
        PayloadTooLargeError: More bytes or pixels than allowed.
        UnsupportedMediaTypeError: Not a picture that Pillow can read.
        InvalidInputError: Anything else that is not a picture.
    """
    if isinstance(value, str):
        value = from_base64(value, what="picture", max_bytes=section.max_bytes, key="handler.openvino.image.max_bytes")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return decode(bytes(value), section, upright=True)
    kind = "null" if value is None else type(value).__name__
    raise InvalidInputError(f"a picture must come as bytes or base64 text, not {kind}")


def decode(data: bytes, section: ImageSection, *, upright: bool = False) -> Image.Image:
    """Decodes bytes to an RGB picture, after checking that its size is allowed.

    Args:
        data: Encoded picture.
        section: Limits.
        upright: Whether the picture is turned as its EXIF data say.
    """
    if len(data) > section.max_bytes:
        raise PayloadTooLargeError(
            f"the picture has {len(data)} bytes, more than handler.openvino.image.max_bytes {section.max_bytes}"
        )
    try:
        picture = Image.open(io.BytesIO(data), formats=section.formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PayloadTooLargeError(f"the picture is too large: {error}") from error
    except MemoryError:
        raise
    except Exception as error:
        # Pillow's decoders raise whatever a damaged header leads them to.
        raise UnsupportedMediaTypeError(
            f"the {len(data)} bytes are not an image in one of the formats {listed(section.formats)} "
            "(handler.openvino.image.formats)"
        ) from error
    pixels = picture.width * picture.height
    if pixels > section.max_pixels:
        raise PayloadTooLargeError(
            f"the picture has {picture.width} x {picture.height} = {pixels} pixels, more than "
            f"handler.openvino.image.max_pixels {section.max_pixels}"
        )
    try:
        return (ImageOps.exif_transpose(picture) if upright else picture).convert("RGB")
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidInputError(f"the picture is damaged: {type(error).__name__}: {error}") from error


def check_resized(width: int, height: int, section: ImageSection, what: str) -> None:
    """Checks the size of what resizing would make of a picture, before it is made.

    Raises:
        PayloadTooLargeError: It has more than ``image.max_resized_pixels``.
    """
    if width * height > section.max_resized_pixels:
        raise PayloadTooLargeError(
            f"{what} would have {width} x {height} = {width * height} pixels, more than "
            f"handler.openvino.image.max_resized_pixels {section.max_resized_pixels}"
        )


def crop_pixels(picture: Image.Image, section: ImageSection) -> torch.Tensor:
    """Applies Resize and CenterCrop.

    Returns:
        uint8 ``[crop, crop, 3]``, with memory of its own.
    """
    picture = _center_crop(_resize(picture, section), section.crop)
    return torch.from_numpy(np.array(picture, dtype=np.uint8))


def transform(picture: Image.Image, section: ImageSection) -> torch.Tensor:
    """Applies Resize, CenterCrop, ToTensor and Normalize.

    Returns:
        float32 ``[3, crop, crop]``, contiguous.
    """
    return normalize(crop_pixels(picture, section).unsqueeze(0), section.mean, section.std)[0].contiguous()


def normalize(pixels: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Applies ToTensor and Normalize.

    Args:
        pixels: uint8 ``[batch, height, width, 3]``.
        mean: Mean of each channel, in 0..1.
        std: Standard deviation of each channel, in 0..1.

    Returns:
        float32 ``[batch, 3, height, width]``.
    """
    # ToTensor divides in float32, Normalize subtracts and divides in float32: the same order gives the same rounding.
    scaled = pixels.permute(0, 3, 1, 2).to(torch.float32).div(255)
    center = torch.tensor(mean, dtype=torch.float32).view(1, 3, 1, 1)
    return scaled.sub(center).div(torch.tensor(std, dtype=torch.float32).view(1, 3, 1, 1))


class FoldedClassifier(nn.Module):
    """A classifier from 8-bit pixels to probabilities, with normalization and softmax as part of its graph.

    Args:
        model: Maps normalized float32 ``[batch, 3, height, width]`` to logits.
        section: Mean and standard deviation for the normalization.
    """

    def __init__(self, model: nn.Module, section: ImageSection) -> None:
        super().__init__()
        self.model = model
        self._mean, self._std = list(section.mean), list(section.std)
        self.train(model.training)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Maps uint8 ``[batch, height, width, 3]`` to probabilities ``[batch, classes]``."""
        logits = logits_of(self.model(normalize(pixels, self._mean, self._std)))
        return torch.softmax(logits.float(), dim=1)


def logits_of(output: Any) -> torch.Tensor:
    """Returns the logits of a model's output: the tensor itself, its ``logits`` field, or the first item of a tuple."""
    if isinstance(output, torch.Tensor):
        return output
    if hasattr(output, "logits"):
        return output.logits
    if isinstance(output, dict) and "logits" in output:
        return output["logits"]
    return output[0]


def _resize(picture: Image.Image, section: ImageSection) -> Image.Image:
    """Applies Resize(int): the shorter side becomes ``resize``, the longer ``int(resize * long / short)``."""
    width, height = picture.size
    short, long = min(width, height), max(width, height)
    other = int(section.resize * long / short)
    size = (section.resize, other) if width <= height else (other, section.resize)
    check_resized(*size, section, f"the picture of {width} x {height} pixels, with its shorter side resized,")
    return picture if size == picture.size else picture.resize(size, FILTERS[section.interpolation])


def _center_crop(picture: Image.Image, crop: int) -> Image.Image:
    """Applies CenterCrop: pads a smaller picture with black, then rounds the offsets half to even."""
    width, height = picture.size
    if crop > width or crop > height:
        left, top = max(0, (crop - width) // 2), max(0, (crop - height) // 2)
        padded = Image.new("RGB", (max(crop, width), max(crop, height)))
        padded.paste(picture, (left, top))
        picture, (width, height) = padded, padded.size
    top, left = round((height - crop) / 2.0), round((width - crop) / 2.0)
    return picture.crop((left, top, left + crop, top + crop))


def _from_lists(value: list[Any], section: ImageSection) -> torch.Tensor:
    expected = (3, section.crop, section.crop)
    # A larger array has another shape, so it need not be made.
    most = math.prod(expected) * torch.float64.itemsize
    array = array_of(value, "the array", max_bytes=most, key=f"the model's input {list(expected)}, in bytes")
    if array.shape != expected:
        raise InvalidInputError(f"the array has shape {list(array.shape)}; the model takes {list(expected)}")
    return torch.from_numpy(array).to(torch.float32)
