"""Transforms equal torchvision's formulas; each kind of bad image gets its own error."""

import base64
import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from torchserve_openvino.config.sections.task_sections import ImageSection
from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError, UnsupportedMediaTypeError
from torchserve_openvino.tasks.picture_transforms import to_tensor, transform

SECTION = ImageSection()


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind)
    return buffer.getvalue()


def reference(image: Image.Image, section: ImageSection) -> torch.Tensor:
    """torchvision 0.28's transforms of a PIL image, written out step by step."""
    w, h = image.size
    if (w <= h and w == section.resize) or (h <= w and h == section.resize):
        resized = image
    elif w < h:
        resized = image.resize((section.resize, int(section.resize * h / w)), Image.Resampling.BILINEAR)
    else:
        resized = image.resize((int(section.resize * w / h), section.resize), Image.Resampling.BILINEAR)
    array = np.asarray(resized)
    height, width = array.shape[:2]
    crop = section.crop
    if crop > width or crop > height:
        left = (crop - width) // 2 if crop > width else 0
        top = (crop - height) // 2 if crop > height else 0
        right = (crop - width + 1) // 2 if crop > width else 0
        bottom = (crop - height + 1) // 2 if crop > height else 0
        array = np.pad(array, ((top, bottom), (left, right), (0, 0)))
        height, width = array.shape[:2]
    top, left = round((height - crop) / 2.0), round((width - crop) / 2.0)
    array = array[top : top + crop, left : left + crop]
    tensor = torch.from_numpy(array.transpose(2, 0, 1).copy()).float() / 255
    mean, std = torch.tensor(section.mean), torch.tensor(section.std)
    return (tensor - mean[:, None, None]) / std[:, None, None]


@settings(max_examples=40, deadline=None)
@given(width=st.integers(1, 400), height=st.integers(1, 400), crop=st.integers(1, 300), resize=st.integers(1, 300))
def test_transform_equals_torchvisions_formulas(width: int, height: int, crop: int, resize: int) -> None:
    assume(max(width, height) / min(width, height) <= 20)
    section = ImageSection(crop=crop, resize=resize)
    image = picture(width, height)
    got = transform(image, section)
    assert got.shape == (3, crop, crop) and got.dtype is torch.float32 and got.is_contiguous()
    assert torch.equal(got, reference(image, section))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_bytes_base64_and_data_urls_are_the_same_picture(kind: str) -> None:
    data = encoded(picture(300, 260), kind)
    text = base64.b64encode(data).decode()
    tensors = [
        to_tensor(v, SECTION) for v in (data, bytearray(data), text, f"data:image/png;base64,{text}", {"b64": text})
    ]
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_other_modes_become_rgb(mode: str) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    assert to_tensor(encoded(picture(300, 260, mode), kind), SECTION).shape == (3, 224, 224)


def test_nested_lists_are_the_ready_tensor() -> None:
    ready = torch.randn(3, 224, 224)
    torch.testing.assert_close(to_tensor(ready.tolist(), SECTION), ready)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (b"no picture", UnsupportedMediaTypeError, "not an image in one of the formats JPEG, PNG"),
        (encoded(picture(64, 64))[:-40], InvalidInputError, "damaged"),
        ("%%%", InvalidInputError, "base64"),
        ([[1, 2], [3]], InvalidInputError, "rectangular"),
        ([[1.0]], InvalidInputError, r"shape \[1, 1\].*\[3, 224, 224\]"),
        (3.5, InvalidInputError, "float"),
    ],
    ids=["text", "truncated", "base64", "ragged", "shape", "number"],
)
def test_bad_pictures_say_what_is_wrong(value, error, message) -> None:
    with pytest.raises(error, match=message):
        to_tensor(value, SECTION)


@pytest.mark.parametrize("value", [b"x" * 1001, "A" * 1400], ids=["bytes", "text"])
def test_a_payload_above_the_limit_is_not_decoded(value) -> None:
    with pytest.raises(PayloadTooLargeError, match="max_bytes"):
        to_tensor(value, ImageSection(max_bytes=1000))


def test_a_picture_above_the_pixel_limit_is_not_decoded() -> None:
    section = ImageSection(max_pixels=10_000)
    with pytest.raises(PayloadTooLargeError, match=r"200 x 100 = 20000 pixels.*max_pixels 10000"):
        to_tensor(encoded(picture(200, 100)), section)


def test_pillow_is_warm_before_the_first_photo() -> None:
    code = (
        "from PIL import Image, JpegImagePlugin\n"
        "from torchserve_openvino.config.sections.task_sections import ImageSection\n"
        "from torchserve_openvino.tasks import picture_transforms\n"
        "decoded = []\n"
        "load = JpegImagePlugin.JpegImageFile.load_prepare\n"
        "JpegImagePlugin.JpegImageFile.load_prepare = lambda self: decoded.append(self.size) or load(self)\n"
        "picture_transforms.warm(ImageSection())\n"
        "picture_transforms.warm(ImageSection(max_bytes=1))\n"
        "print(decoded, sorted({'JPEG', 'PNG'} & Image.OPEN.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[(640, 480)] ['JPEG', 'PNG']"
