"""What generation/images relies on in diffusers: names of classes, and how its pipelines call models."""

import inspect

import diffusers
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput

from torchserve_openvino.generation.images.families import FAMILIES
from torchserve_openvino.generation.images.pictures import SCHEDULERS

PIPELINES = [(mode, name) for family in FAMILIES for mode, name in family.modes.items()]
ALWAYS = {
    "prompt", "num_inference_steps", "guidance_scale", "negative_prompt", "generator", "output_type", "return_dict",
    "callback_on_step_end",
}  # fmt: skip
BESIDES = {
    "text": {"width", "height"},
    "image": {"image", "strength"},
    "inpaint": {"width", "height", "image", "mask_image", "strength"},
}


@pytest.mark.parametrize(("mode", "name"), PIPELINES)
def test_pipelines_take_what_they_are_given(mode: str, name: str) -> None:
    kind = getattr(diffusers, name)
    assert set(inspect.signature(kind.__call__).parameters) >= ALWAYS | BESIDES[mode]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_pipelines_are_made_of_the_models_that_are_loaded(family) -> None:
    parts = {*family.models, *family.tokenizers, "scheduler"}
    optional = {"safety_checker", "feature_extractor", "image_encoder", "add_watermarker", "requires_safety_checker"}
    for name in family.modes.values():
        taken = set(inspect.signature(getattr(diffusers, name).__init__).parameters) - {"self"}
        assert parts <= taken <= parts | optional | set(family.options), name


def test_schedulers_have_these_names() -> None:
    for name in SCHEDULERS.values():
        assert issubclass(getattr(diffusers, name), diffusers.SchedulerMixin)


def test_the_latents_of_a_picture_are_a_distribution_of_moments() -> None:
    moments = torch.randn(1, 8, 4, 4)
    found = AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(moments)).latent_dist
    assert found.parameters is moments and found.mean.shape == (1, 4, 4, 4)
    first, second = (found.sample(torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)
