"""The sections of the tasks under `handler.openvino`: how requests are read, and their limits."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator

from torchserve_openvino.config.fields import (
    AllLengths,
    Boolean,
    Channels,
    Count,
    ImageFormats,
    NotNegative,
    PictureSizes,
    Positive,
)

# Immutable, without unknown keys; the docstring of a field is its help.
SECTION = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Section(BaseModel):
    """Base of all sections."""

    model_config = SECTION


class ImageSection(Section):
    """Transforms of image_classifier, as torchvision's Resize, CenterCrop, ToTensor and Normalize."""

    resize: Count = 256
    """Length of the shorter side after resizing, in pixels."""
    crop: Count = 224
    """Side of the square cut from the center, in pixels."""
    mean: Channels = (0.485, 0.456, 0.406)
    """Mean of each RGB channel, in 0..1."""
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    """Standard deviation of each RGB channel, in 0..1."""
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"
    """Resizing filter."""
    fold: Boolean = False
    """Scale, normalize and compute softmax inside the OpenVINO graph, on 8-bit pixels: faster, with a quarter of the
    data to copy. Only photos are accepted then, not tensors as nested lists."""
    top_k: Count = 5
    """Number of classes in the answer."""
    max_pixels: Count = 89_478_485
    """Largest image to decode, in pixels. The default is Pillow's limit against decompression bombs, which
    refuses what has more than twice as many."""
    max_resized_pixels: Count = 16_777_216
    """Largest image that resizing may make, in pixels: before the crop, where one side is much longer than the other,
    and a label map or a depth map in the image's own size. Larger ones answer 413."""
    max_bytes: Count = 32 * 1024 * 1024
    """Largest image to accept, in bytes as sent. TorchServe's own `max_request_size` (6.5 MB) holds besides."""
    formats: ImageFormats = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]
    """Formats of images to accept, by Pillow's names; others answer 415. Further ones: AVIF, ICO, JPEG2000, PPM, TGA.
    Pillow opens no other, so that no decoder runs that you don't know of, as Ghostscript would for EPS."""


class TensorSection(Section):
    """Requests of the handler tensor."""

    max_bytes: Count = 64 * 1024 * 1024
    """Largest request to accept, in bytes. TorchServe's own `max_request_size` (6.5 MB) holds besides."""
    concatenate: Boolean = True
    """Whether the requests of a batch are joined along dimension 0; otherwise each runs alone."""


class TextSection(Section):
    """Requests of the text tasks."""

    max_tokens: Count | None = None
    """Longest text, in tokens with the special ones. Unset: what the model was made for, up to 512."""
    too_long: Literal["refuse", "truncate"] = "refuse"
    """What happens to a longer text: `refuse` answers 400 with its number of tokens, `truncate` drops its end."""
    lengths: AllLengths = "auto"
    """Compiled lengths in tokens; a text is padded to the next one. `auto`: multiples of 16 up to 128, then powers of
    two and the middles between them, and `max_tokens`."""
    max_inputs: Count = 64
    """Most inputs in one request: texts of a list, texts to rank, labels of a zero-shot task."""
    max_bytes: Count = 1024 * 1024
    """Largest request, in bytes; JSON that TorchServe has parsed counts as its shortest text. Also the most characters
    that the tokenizer reads for one request, where a text is read with each of several labels or texts."""


class AudioSection(Section):
    """Requests of the audio tasks."""

    max_seconds: Positive | None = None
    """Longest recording, in seconds; longer ones answer 413. Unset: 30, or 600 for Whisper, which hears it window by
    window."""
    lengths: AllLengths = "auto"
    """Compiled lengths in seconds (of a list: whole ones); a recording is padded to the next one. `auto`: powers of two
    and the middles between them (1, 1.5, 2, 3, 4 ...), up to `max_seconds`. Whisper has one length, its window."""
    max_bytes: Count = 32 * 1024 * 1024
    """Largest recording to accept, in bytes as sent. TorchServe's own `max_request_size` (6.5 MB) holds besides."""


class ImageGenerationSection(Section):
    """Requests of image_generator."""

    sizes: PictureSizes = "auto"
    """Sizes of pictures in pixels, width x height: `[512x512, 768x512]`. All are compiled before READY, others answer
    400; the first is the default. `auto`: the one that the model was made for."""
    guided: Literal["always", "never", "both"] = "always"
    """`always`: only pictures with guidance above 1, for which the denoiser runs on a batch of two. `never`: only those
    without, as distilled models need. `both` compiles it for both."""
    guidance: NotNegative | None = None
    """Guidance of a request that names none. Unset: the default of diffusers, or 1 with `guided: never`."""
    default_steps: Count | None = None
    """Steps of a request that names none. Unset: the default of diffusers, at most `max_steps`."""
    max_steps: Count = 100
    """Most steps of one picture."""
    max_images: Count = 4
    """Most pictures of one request. They are made one after another."""
    image_to_image: Boolean = True
    """Whether a request may bring a picture to start from, or one and a mask; compiles the encoder of the VAE."""
    too_long: Literal["refuse", "truncate"] = "refuse"
    """What happens to a prompt with more tokens than the model takes: `refuse` answers 400 with their number,
    `truncate` drops its end."""

    @model_validator(mode="after")
    def _defaults_are_possible(self) -> "ImageGenerationSection":
        if self.guidance is not None and self.guided != "both" and (self.guidance > 1) != (self.guided == "always"):
            bounds = "above 1" if self.guided == "always" else "at most 1"
            raise ValueError(f"guided: {self.guided} needs a guidance {bounds}; it is {self.guidance:g}.")
        if self.default_steps is not None and self.default_steps > self.max_steps:
            raise ValueError(f"default_steps is {self.default_steps}, more than max_steps {self.max_steps}.")
        return self
