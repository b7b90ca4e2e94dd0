"""Turns a request into what the pipeline makes, and checks it against the limits of the configuration."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from torchserve_openvino.config.sections.openvino_section import OpenVINOSection
from torchserve_openvino.config.spelling import listed, nearest
from torchserve_openvino.errors import InvalidInputError, ModelLoadError
from torchserve_openvino.generation.images.components import PictureSize
from torchserve_openvino.generation.images.pictures import ImageSettings, PictureMaker
from torchserve_openvino.tasks import picture_transforms
from torchserve_openvino.tasks.hub_handler import text_of
from torchserve_openvino.tasks.pictures.picture_parameters import MOST_SEED, PictureParameters, size_of

KEY = "handler.openvino.image_generation"
# Far above what any model reads: a longer text is not even split into tokens.
_MOST_CHARACTERS = 20_000


@dataclass(frozen=True)
class ImageRequest:
    """The pictures of one request.

    Attributes:
        settings: What each is made of.
        seeds: The seed of each.
        png: Whether the answer is the picture itself, else JSON.
        stream: Whether progress is streamed.
    """

    settings: ImageSettings
    seeds: tuple[int, ...]
    png: bool
    stream: bool


class PictureLimits:
    """What requests may ask.

    Args:
        section: ``handler.openvino``.
        maker: The pipeline.
        sizes: The sizes that are compiled; the first is the default.

    Raises:
        ModelLoadError: The configuration asks for what the pipeline can't do.
    """

    def __init__(self, section: OpenVINOSection, maker: PictureMaker, sizes: Sequence[PictureSize]) -> None:
        self._section, self._own, self._maker = section, section.image_generation, maker
        self.sizes = list(sizes)
        if maker.most_steps is not None and self._own.max_steps > maker.most_steps:
            raise ModelLoadError(f"{KEY}.max_steps is {self._own.max_steps}; the scheduler has {maker.most_steps}.")
        if maker.components.inpaints_only and not self._own.image_to_image:
            raise ModelLoadError(f"{KEY}.image_to_image: this model only fills masks, so it must be true.")
        own_steps = int(maker.default("num_inference_steps"))
        self.steps = self._own.default_steps or min(own_steps, self._own.max_steps)
        usual = 1.0 if self._own.guided == "never" else float(maker.default("guidance_scale"))
        self.guidance = usual if self._own.guidance is None else self._own.guidance

    @property
    def max_bytes(self) -> int:
        """The largest request in bytes: two pictures in base64, which takes four characters for three bytes."""
        return self._section.image.max_bytes * 8 // 3 + 65536

    @property
    def guidances(self) -> list[float]:
        """A guidance for each batch size that is compiled."""
        above = self.guidance if self.guidance > 1 else 2.0
        return {"always": [above], "never": [1.0], "both": [above, 1.0]}[self._own.guided]

    def validate(self, prompt: str, parameters: PictureParameters) -> ImageRequest:
        """Checks a request.

        Raises:
            InvalidInputError: It asks for more than the limits, or for what the pipeline can't do.
            PayloadTooLargeError: A picture in it is too large.
        """
        self._check_prompt("the prompt", prompt)
        steps = self._steps(parameters.steps)
        if parameters.n > self._own.max_images:
            raise InvalidInputError(
                f"n is {parameters.n}; one request gets {self._own.max_images} pictures at most ({KEY}.max_images)"
            )
        guidance = self._guidance(parameters)
        if parameters.scheduler is not None and parameters.scheduler not in (known := self._maker.schedulers):
            hint = nearest(parameters.scheduler, known)
            raise InvalidInputError(
                f"unknown scheduler {parameters.scheduler!r}; this model takes {listed(known)}."
                + (f" Did you mean {hint!r}?" if hint else "")
            )
        picture, mask = self._pictures(parameters)
        size = self._size(size_of(parameters), picture)
        settings = ImageSettings(
            prompt,
            size,
            steps,
            guidance,
            parameters.negative_prompt,
            parameters.scheduler,
            picture,
            mask,
            parameters.strength,
        )
        if steps < (least := self._maker.least_steps(settings)):
            raise InvalidInputError(f"steps is {steps}; this scheduler makes {least} at least")
        if picture is not None:
            strength = float(
                self._maker.default("strength", settings.mode) if parameters.strength is None else parameters.strength
            )
            settings = replace(settings, strength=strength)
            if int(steps * strength) < 1:
                raise InvalidInputError(f"strength {strength:g} of {steps} steps makes no step; raise one of them")
        return ImageRequest(settings, self._seeds(parameters), self._is_png(parameters), parameters.stream)

    def _check_prompt(self, what: str, text: str) -> None:
        if len(text) > _MOST_CHARACTERS:
            raise InvalidInputError(f"{what} has {len(text)} characters; the most is {_MOST_CHARACTERS}")
        count, limit = self._maker.tokens(text)
        if count > limit and self._own.too_long == "refuse":
            raise InvalidInputError(
                f"{what} has {count} tokens; this model reads {limit}. Shorten it, or set {KEY}.too_long: truncate"
            )

    def _steps(self, steps: int | None) -> int:
        if steps is not None and steps > self._own.max_steps:
            raise InvalidInputError(f"steps is {steps}; the most is {self._own.max_steps} ({KEY}.max_steps)")
        return self.steps if steps is None else steps

    def _guidance(self, parameters: PictureParameters) -> float:
        guidance = self.guidance if parameters.guidance is None else parameters.guidance
        if self._own.guided != "both" and (guidance > 1) != (self._own.guided == "always"):
            bounds = "above 1" if self._own.guided == "always" else "at most 1"
            raise InvalidInputError(
                f"guidance is {guidance:g}; this model is compiled for guidance {bounds} ({KEY}.guided)"
            )
        if parameters.negative_prompt:
            if guidance <= 1:
                raise InvalidInputError(f"negative_prompt needs guidance above 1; it is {guidance:g}")
            self._check_prompt("negative_prompt", text_of(parameters.negative_prompt, "negative_prompt"))
        return guidance

    def _pictures(self, parameters: PictureParameters) -> tuple[Image.Image | None, Image.Image | None]:
        if parameters.image is None:
            for name in ("mask_image", "strength"):
                if getattr(parameters, name) is not None:
                    raise InvalidInputError(f"{name} needs image, the picture to start from")
            if self._maker.components.inpaints_only:
                raise InvalidInputError("this model only fills masks: send image and mask_image")
            return None, None
        if not self._own.image_to_image:
            raise InvalidInputError(f"this model takes no pictures ({KEY}.image_to_image: false)")
        picture = picture_transforms.picture_of(parameters.image, self._section.image)
        if parameters.mask_image is None:
            if self._maker.components.inpaints_only:
                raise InvalidInputError("this model only fills masks: send mask_image")
            return picture, None
        mask = picture_transforms.picture_of(parameters.mask_image, self._section.image)
        if mask.size != picture.size:
            raise InvalidInputError(
                f"mask_image has {mask.width} x {mask.height} pixels, image {picture.width} x {picture.height}"
            )
        return picture, mask

    def _size(self, text: str | None, picture: Image.Image | None) -> PictureSize:
        known = listed([str(size) for size in self.sizes])
        if text is None and picture is None:
            return self.sizes[0]
        if text is None:
            assert picture is not None
            own = PictureSize(picture.width, picture.height)
            if own not in self.sizes:
                raise InvalidInputError(f"image has {own} pixels; send {known}, or name the size to stretch it to")
            return own
        try:
            size = PictureSize.of(text)
        except ValueError as error:
            raise InvalidInputError(f"{error}; this model makes {known}") from error
        if size not in self.sizes:
            raise InvalidInputError(f"size is {size}; this model makes {known} ({KEY}.sizes)")
        return size

    def _seeds(self, parameters: PictureParameters) -> tuple[int, ...]:
        # Smaller than the largest by default, so that JavaScript reads it right.
        first = int.from_bytes(os.urandom(6), "big") if parameters.seed is None else parameters.seed
        return tuple((first + number) % (MOST_SEED + 1) for number in range(parameters.n))

    def _is_png(self, parameters: PictureParameters) -> bool:
        if parameters.stream and parameters.response_format == "png":
            raise InvalidInputError("stream: true sends pictures as b64_json; leave response_format out")
        if parameters.n > 1 and parameters.response_format == "png":
            raise InvalidInputError(
                f"{parameters.n} pictures do not fit into one PNG; ask for response_format: b64_json"
            )
        return parameters.n == 1 and not parameters.stream and parameters.response_format != "b64_json"

    def to_dict(self) -> dict[str, Any]:
        """Returns limits and defaults, JSON-safe, for the report."""
        return {
            "pipeline": self._maker.name,
            "sizes": [str(size) for size in self.sizes],
            "steps": {"default": self.steps, "most": self._own.max_steps},
            "guidance": {"default": self.guidance, "guided": self._own.guided},
            "images": self._own.max_images,
            "image_to_image": self._own.image_to_image,
            "schedulers": self._maker.schedulers,
            "safety": self._maker.notes,
        }
