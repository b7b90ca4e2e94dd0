"""The sections of the tasks under `handler.openvino`: how requests are read, and their limits."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from torchserve_openvino.config.fields import Boolean, Channels, Count, Positive, Sizes

# Immutable, without unknown keys; the docstring of a field is its help.
SECTION = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TaskSection(BaseModel):
    """Base of these sections."""

    model_config = SECTION


class ImageSection(TaskSection):
    """Transforms of image_classifier, as torchvision's Resize, CenterCrop, ToTensor and Normalize."""

    resize: Count = 256
    """Length of the shorter side after resizing, in pixels."""
    crop: Count = 224
    """Side of the square cut from the centre, in pixels."""
    mean: Channels = (0.485, 0.456, 0.406)
    """Mean of each RGB channel, in 0..1."""
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    """Standard deviation of each RGB channel, in 0..1."""
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"
    """Resizing filter."""
    fold: Boolean = False
    """Scale, normalise and compute softmax inside the OpenVINO graph, on 8-bit pixels: faster, with a quarter of the
    data to copy. Only photos are accepted then, not tensors as nested lists."""
    top_k: Count = 5
    """Number of classes in the answer."""
    max_pixels: Count = 89_478_485
    """Largest image to decode, in pixels. The default is Pillow's limit against decompression bombs."""
    max_bytes: Count = 32 * 1024 * 1024
    """Largest image to accept, in bytes as sent."""


class TensorSection(TaskSection):
    """Requests of the handler tensor."""

    max_bytes: Count = 64 * 1024 * 1024
    """Largest request to accept, in bytes."""
    concatenate: Boolean = True
    """Whether the requests of a batch are joined along dimension 0; otherwise each runs alone."""


class TextSection(TaskSection):
    """Requests of the text tasks."""

    max_tokens: Count | None = None
    """Longest text, in tokens with the special ones. Unset: what the model was made for, up to 512."""
    too_long: Literal["refuse", "truncate"] = "refuse"
    """What happens to a longer text: `refuse` answers 400 with its number of tokens, `truncate` drops its end."""
    lengths: Sizes = "auto"
    """Compiled lengths in tokens; a text is padded to the next one. `auto`: powers of two from 16, and `max_tokens`."""
    max_inputs: Count = 64
    """Most inputs in one request: texts of a list, texts to rank, labels of a zero-shot task."""
    max_bytes: Count = 1024 * 1024
    """Largest request, in bytes."""


class AudioSection(TaskSection):
    """Requests of the audio tasks."""

    max_seconds: Positive = 30.0
    """Longest recording, in seconds; longer ones answer 413."""
    lengths: Sizes = "auto"
    """Compiled lengths, in whole seconds; a recording is padded to the next one. `auto`: powers of two up to
    `max_seconds`."""
    max_bytes: Count = 32 * 1024 * 1024
    """Largest recording to accept, in bytes as sent."""
