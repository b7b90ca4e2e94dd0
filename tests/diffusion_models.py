"""Small diffusers pipelines with random weights and tokenizers of single letters, saved by `save_pretrained`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Tokens that the CLIP encoders read.
LENGTH = 24
_BLOCKS = (16, 32)


def pipeline_folder(kind: str, folder: Path, **changes: Any) -> Path:
    """Saves a pipeline of a kind: ``sd``, ``sd2``, ``inpaint``, ``xl`` or ``sd3``."""
    torch.manual_seed(0)
    pipe = _MAKERS[kind](**changes)
    pipe.save_pretrained(folder)
    return folder


def letters() -> dict[str, int]:
    """A vocabulary of CLIP: each byte, also at the end of a word."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    words = [*alphabet, *(f"{letter}</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    return {word: number for number, word in enumerate(words)}


def clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    return CLIPTokenizer(vocab=letters(), merges=[], model_max_length=LENGTH)


def t5_tokenizer() -> Any:
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5Tokenizer(vocab=[*pieces, *((chr(code), -3.0) for code in range(97, 123))], extra_ids=0)


def clip_encoder(kind: str, width: int, *, layers: int = 3) -> Any:
    import transformers

    words = letters()
    config = transformers.CLIPTextConfig(
        hidden_size=width, intermediate_size=37, num_attention_heads=4, num_hidden_layers=layers, projection_dim=width,
        vocab_size=len(words), max_position_embeddings=LENGTH, bos_token_id=words["<|startoftext|>"],
        eos_token_id=words["<|endoftext|>"], pad_token_id=words["<|endoftext|>"],
    )  # fmt: skip
    return getattr(transformers, kind)(config).eval()


def vae(latents: int = 4, **more: Any) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=_BLOCKS, in_channels=3, out_channels=3, latent_channels=latents, norm_num_groups=8,
        down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2, sample_size=32, **more,
    ).eval()  # fmt: skip


def unet(width: int, **more: Any) -> Any:
    from diffusers import UNet2DConditionModel

    settings: dict[str, Any] = {
        "block_out_channels": _BLOCKS, "layers_per_block": 1, "sample_size": 16, "in_channels": 4, "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": width,
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4, "norm_num_groups": 8,
    }  # fmt: skip
    return UNet2DConditionModel(**(settings | more)).eval()


def scheduler() -> Any:
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False,
        steps_offset=1,
    )  # fmt: skip


def safety_checker(threshold: float) -> Any:
    """A checker that flags pictures whose cosine with one of 17 random concepts is above a threshold."""
    from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
    from transformers import CLIPConfig

    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = CLIPConfig(
        vision_config={**tower, "image_size": 32, "patch_size": 8, "projection_dim": 16}, text_config=tower,
        projection_dim=16,
    )  # fmt: skip
    checker = StableDiffusionSafetyChecker(config).eval()
    with torch.no_grad():
        checker.concept_embeds.normal_()
        checker.special_care_embeds.normal_()
        checker.concept_embeds_weights.fill_(threshold)
        checker.special_care_embeds_weights.fill_(0.3)
    return checker


def stable_diffusion(threshold: float | None = None, **more: Any) -> Any:
    from diffusers import StableDiffusionPipeline
    from transformers import CLIPImageProcessorPil

    side = {"height": 32, "width": 32}
    parts = {
        "vae": vae(), "unet": unet(32), "text_encoder": clip_encoder("CLIPTextModel", 32),
        "tokenizer": clip_tokenizer(), "scheduler": scheduler(),
        "safety_checker": None if threshold is None else safety_checker(threshold),
        "feature_extractor": CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=side),
    }  # fmt: skip
    return StableDiffusionPipeline(**(parts | more), requires_safety_checker=threshold is not None)


def stable_diffusion_2() -> Any:
    """One with the heads, projections and predictions of version 2."""
    from diffusers import DDIMScheduler

    own = scheduler()
    return stable_diffusion(
        unet=unet(32, use_linear_projection=True, attention_head_dim=(2, 4), upcast_attention=True),
        scheduler=DDIMScheduler.from_config(own.config, prediction_type="v_prediction"),
    )


def inpainting() -> Any:
    """One whose denoiser also reads the mask and the masked picture."""
    from diffusers import StableDiffusionInpaintPipeline

    parts = stable_diffusion(unet=unet(32, in_channels=9)).components
    return StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False)


def stable_diffusion_xl(**more: Any) -> Any:
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    parts = {
        "vae": vae(),
        "unet": unet(
            64, addition_embed_type="text_time", addition_time_embed_dim=8, transformer_layers_per_block=(1, 2),
            projection_class_embeddings_input_dim=6 * 8 + 32, use_linear_projection=True,
        ),
        "text_encoder": clip_encoder("CLIPTextModel", 32), "tokenizer": clip_tokenizer(),
        "text_encoder_2": clip_encoder("CLIPTextModelWithProjection", 32), "tokenizer_2": clip_tokenizer(),
        "scheduler": EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
            timestep_spacing="leading",
        ),
    }  # fmt: skip
    return StableDiffusionXLPipeline(**(parts | more), add_watermarker=False)


def stable_diffusion_3(with_t5: bool = True, **more: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import T5Config, T5EncoderModel

    transformer = SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=16, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=32, out_channels=16,
    ).eval()  # fmt: skip
    t5 = T5Config(vocab_size=32, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu")
    parts = {
        "transformer": transformer, "vae": vae(16, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06),
        "text_encoder": clip_encoder("CLIPTextModelWithProjection", 16), "tokenizer": clip_tokenizer(),
        "text_encoder_2": clip_encoder("CLIPTextModelWithProjection", 16), "tokenizer_2": clip_tokenizer(),
        "text_encoder_3": T5EncoderModel(t5).eval() if with_t5 else None,
        "tokenizer_3": t5_tokenizer() if with_t5 else None, "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    }  # fmt: skip
    return StableDiffusion3Pipeline(**(parts | more))


_MAKERS: dict[str, Callable[..., Any]] = {
    "sd": stable_diffusion, "sd2": stable_diffusion_2, "inpaint": inpainting, "xl": stable_diffusion_xl,
    "sd3": stable_diffusion_3,
}  # fmt: skip
