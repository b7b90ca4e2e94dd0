"""The kinds of pipelines that are served, as plain data: classes of diffusers and transformers by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# What `save_pretrained` of a pipeline writes beside the folders of its components.
INDEX = "model_index.json"
Mode = Literal["text", "image", "inpaint"]
_CLIP, _CLIP_PROJECTED = "CLIPTextModel", "CLIPTextModelWithProjection"


@dataclass(frozen=True)
class Family:
    """One kind of pipeline.

    Attributes:
        name: For messages.
        modes: The class that makes a picture of a text, from a picture, and inside a mask.
        models: Class of each model.
        tokenizers: The text encoder of each tokenizer.
        may_lack: Models that a folder may leave out.
        options: Entries of ``model_index.json`` that are arguments of the pipelines.
        has_safety_checker: Whether its pipelines know a safety checker.
    """

    name: str
    modes: Mapping[Mode, str]
    models: Mapping[str, str]
    tokenizers: Mapping[str, str]
    may_lack: frozenset[str] = frozenset()
    options: tuple[str, ...] = ()
    has_safety_checker: bool = False

    @property
    def pipelines(self) -> tuple[str, ...]:
        """Classes of its pipelines, as ``model_index.json`` names them."""
        return tuple(self.modes.values())


def _modes(start: str) -> dict[Mode, str]:
    return {"text": f"{start}Pipeline", "image": f"{start}Img2ImgPipeline", "inpaint": f"{start}InpaintPipeline"}


FAMILIES = (
    Family(
        "Stable Diffusion",
        _modes("StableDiffusion"),
        {"vae": "AutoencoderKL", "unet": "UNet2DConditionModel", "text_encoder": _CLIP},
        {"tokenizer": "text_encoder"},
        has_safety_checker=True,
    ),
    Family(
        "Stable Diffusion XL",
        _modes("StableDiffusionXL"),
        {
            "vae": "AutoencoderKL",
            "unet": "UNet2DConditionModel",
            "text_encoder": _CLIP,
            "text_encoder_2": _CLIP_PROJECTED,
        },
        {"tokenizer": "text_encoder", "tokenizer_2": "text_encoder_2"},
        options=("force_zeros_for_empty_prompt", "requires_aesthetics_score"),
    ),
    Family(
        "Stable Diffusion 3",
        _modes("StableDiffusion3"),
        {
            "vae": "AutoencoderKL",
            "transformer": "SD3Transformer2DModel",
            "text_encoder": _CLIP_PROJECTED,
            "text_encoder_2": _CLIP_PROJECTED,
            "text_encoder_3": "T5EncoderModel",
        },
        {"tokenizer": "text_encoder", "tokenizer_2": "text_encoder_2", "tokenizer_3": "text_encoder_3"},
        may_lack=frozenset({"text_encoder_3"}),
    ),
)
