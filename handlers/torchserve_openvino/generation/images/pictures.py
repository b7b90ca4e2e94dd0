"""Makes pictures with diffusers' own pipelines, whose models are stand-ins for compiled graphs."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image

from torchserve_openvino.backend.runtime.compare import is_finite
from torchserve_openvino.errors import BlankPictureError, ModelLoadError, WithheldPictureError
from torchserve_openvino.generation.images.components import T5_TOKENS, Components, PictureSize
from torchserve_openvino.generation.images.families import Mode
from torchserve_openvino.generation.images.loading import Loaded, diffusers

# Schedulers that a request may name. Others draw random numbers that a seed does not determine, or need SciPy.
SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "dpm_solver": "DPMSolverMultistepScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_ancestral": "EulerAncestralDiscreteScheduler",
    "flow_match_euler": "FlowMatchEulerDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "pndm": "PNDMScheduler",
    "unipc": "UniPCMultistepScheduler",
}
# Told the number of a step, from 1, and how many there are.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ImageSettings:
    """What a picture is made of.

    Attributes:
        prompt: What it shows.
        size: Its size; one that is compiled.
        steps: Steps from noise to picture.
        guidance: How closely it follows the prompt; above 1 the denoiser runs with and without the prompt.
        negative_prompt: What it does not show; only with guidance.
        scheduler: A name in `PictureMaker.schedulers`; None for the folder's own.
        image: A picture to start from.
        mask: Where to change that picture: where it is white.
        strength: How far from that picture to go, above 0, at most 1; None for the pipeline's default.
    """

    prompt: str
    size: PictureSize
    steps: int
    guidance: float
    negative_prompt: str | None = None
    scheduler: str | None = None
    image: Image.Image | None = None
    mask: Image.Image | None = None
    strength: float | None = None

    @property
    def mode(self) -> Mode:
        """Which pipeline makes it."""
        if self.image is None:
            return "text"
        return "image" if self.mask is None else "inpaint"


class PictureMaker:
    """Makes one picture at a time, so that each depends on its own seed only, and not on others beside it.

    Args:
        loaded: The pipeline's models; nothing is compiled yet.

    Attributes:
        components: The graphs of the models.
        name: The class of the pipeline that makes pictures of texts.
        notes: Remarks for the report.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.components = Components(loaded)
        self.notes = list(loaded.notes)
        self.name = loaded.family.modes["text"]
        self._loaded = loaded
        self._pipelines: dict[Mode, Any] = {mode: self._pipeline(mode) for mode in loaded.family.modes}
        # Pipelines correct outdated configurations, and keep the last scheduler that they used.
        self._scheduling = {mode: type(pipe.scheduler) for mode, pipe in self._pipelines.items()}
        self._configured = {mode: pipe.scheduler.config for mode, pipe in self._pipelines.items()}

    def _pipeline(self, mode: Mode) -> Any:
        kind = getattr(diffusers(), self._loaded.family.modes[mode])
        scheduler = self._loaded.components["scheduler"]
        options = {
            **self._loaded.components,
            **self.components.standing,
            "scheduler": type(scheduler).from_config(scheduler.config),
            **self._loaded.options,
            # Nothing is added to a picture.
            "add_watermarker": False,
            "requires_safety_checker": False,
        }
        taken = inspect.signature(kind.__init__).parameters
        needed = dict.fromkeys(("safety_checker", "feature_extractor", "image_encoder"))
        pipe = kind(**{name: value for name, value in {**needed, **options}.items() if name in taken})
        pipe.set_progress_bar_config(disable=True)
        return pipe

    # --- what it can do -------------------------------------------------------------------------------------------

    @cached_property
    def schedulers(self) -> list[str]:
        """Names of the schedulers that fit the folder's configuration."""
        fitting = {kind.__name__ for kind in self._loaded.components["scheduler"].compatibles}
        return [name for name, kind in SCHEDULERS.items() if kind in fitting]

    @property
    def most_steps(self) -> int | None:
        """The most steps that the scheduler has times for; None if it does not tell."""
        steps = self._loaded.components["scheduler"].config.get("num_train_timesteps")
        return None if steps is None else int(steps)

    def least_steps(self, settings: ImageSettings) -> int:
        """The least steps that the scheduler of a picture can make."""
        scheduler = self._scheduler(settings)
        # Its first steps follow Runge and Kutta, each in four stages.
        stages = type(scheduler).__name__ == "PNDMScheduler" and not scheduler.config.skip_prk_steps
        return 4 if stages else 1

    def default(self, name: str, mode: Mode = "text") -> Any:
        """Returns the default of an argument of a pipeline, such as ``num_inference_steps``."""
        return inspect.signature(type(self._pipelines[mode]).__call__).parameters[name].default

    def tokens(self, text: str) -> tuple[int, int]:
        """Returns how many tokens a text has, and how many the model reads: the longest of its encoders does.

        The CLIP encoders of Stable Diffusion 3 read the beginning of a text that T5 reads whole.
        """
        counts = []
        for name, encoder in self._loaded.family.tokenizers.items():
            tokenizer = self._loaded.components[name]
            if tokenizer is not None:
                limit = T5_TOKENS if encoder == "text_encoder_3" else int(tokenizer.model_max_length)
                counts.append((len(tokenizer(text).input_ids), limit))
        return max(counts, key=lambda count: count[1])

    # --- making pictures ------------------------------------------------------------------------------------------

    def make(self, settings: ImageSettings, seed: int, on_step: Progress | None = None) -> Image.Image:
        """Makes one picture; equal seeds give equal pictures.

        Args:
            settings: What it is made of.
            seed: Of the noise that it starts from; at least 0.
            on_step: Called after each step.

        Raises:
            BlankPictureError: The model made NaN, or black all over.
            WithheldPictureError: The folder's safety checker flags it.
        """
        pipe = self._pipelines[settings.mode]
        pipe.scheduler = self._scheduler(settings)

        def progress(pipeline: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if on_step is not None:
                on_step(step + 1, int(pipeline.num_timesteps))
            return {}

        arguments: dict[str, Any] = {
            "prompt": settings.prompt,
            "num_inference_steps": settings.steps,
            "guidance_scale": settings.guidance,
            "negative_prompt": settings.negative_prompt if settings.guidance > 1 else None,
            "generator": torch.Generator().manual_seed(seed),
            "output_type": "pt",
            "return_dict": False,
            "callback_on_step_end": progress,
        }
        if settings.mode != "image":
            arguments |= {"width": settings.size.width, "height": settings.size.height}
        if settings.image is not None:
            keeps_size = settings.mode == "inpaint"
            arguments["image"] = settings.image if keeps_size else _resized(settings.image, settings.size)
            arguments |= {"strength": settings.strength} if settings.strength is not None else {}
        if settings.mask is not None:
            arguments["mask_image"] = settings.mask
        if settings.mode == "image" and "height" in inspect.signature(type(pipe).__call__).parameters:
            arguments |= {"width": settings.size.width, "height": settings.size.height}
        with torch.no_grad():
            pixels, *flags = pipe(**arguments)
        if flags and flags[0] is not None and any(flags[0]):
            raise WithheldPictureError(
                "the model's safety checker flags this picture, so it is not sent; change the prompt or the seed"
            )
        return _picture(pixels)

    def _scheduler(self, settings: ImageSettings) -> Any:
        """Returns a new scheduler, since one keeps what it did for the last picture."""
        kind = self._scheduling[settings.mode]
        if settings.scheduler is not None:
            kind = getattr(diffusers(), SCHEDULERS[settings.scheduler])
        return kind.from_config(self._configured[settings.mode])


def _resized(picture: Image.Image, size: PictureSize) -> Image.Image:
    """Returns a picture in another size, with the filter of diffusers."""
    pixels = (size.width, size.height)
    return picture if picture.size == pixels else picture.resize(pixels, Image.Resampling.LANCZOS)


def _picture(pixels: torch.Tensor) -> Image.Image:
    """Returns a picture of float32 ``[1, 3, height, width]`` in 0..1.

    Raises:
        BlankPictureError: It holds NaN, or is black all over.
    """
    if not is_finite(pixels):
        raise BlankPictureError(
            "the model made NaN instead of a picture: lower the guidance, or set handler.openvino.precision: f32"
        )
    values = (pixels[0].permute(1, 2, 0).float().numpy() * 255).round().astype(np.uint8)
    if not values.any():
        raise BlankPictureError("the model made a picture that is black all over; try other steps or guidance")
    return Image.fromarray(values)


def rehearse(maker: PictureMaker, sizes: list[PictureSize], *, guided: list[float], steps: int, images: bool) -> None:
    """Makes a small number of pictures of each size before the first request does.

    Args:
        maker: What makes them, with everything compiled.
        sizes: Their sizes.
        guided: The guidances to use.
        steps: Steps of each.
        images: Whether to start from a picture, too.

    Raises:
        ModelLoadError: One can't be made.
    """
    for size in sizes:
        blank = Image.new("RGB", (size.width, size.height), "grey")
        white = Image.new("L", blank.size, 255)
        for guidance in guided:
            plain = ImageSettings("a picture", size, steps, guidance)
            picture = ImageSettings("a picture", size, steps, guidance, image=blank, strength=1.0)
            masked = ImageSettings("a picture", size, steps, guidance, image=blank, mask=white, strength=1.0)
            requests = [masked] if maker.components.inpaints_only else [plain, picture] if images else [plain]
            for request in requests:
                try:
                    maker.make(request, 0)
                except WithheldPictureError:
                    continue
                except (BlankPictureError, ValueError, RuntimeError, TypeError, KeyError, AttributeError) as error:
                    raise ModelLoadError(f"{maker.name} makes no picture of {size}: {error}") from error
