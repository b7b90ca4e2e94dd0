"""The parts of a pipeline that are compiled, each as a module that takes and returns tensors only."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchserve_openvino.generation.graph_calls import GraphCalls

Tensor = torch.Tensor


class TextGraph(nn.Module):
    """A text encoder.

    Args:
        encoder: The encoder.
        hidden: Whether the pipeline reads the layer before the last.
    """

    def __init__(self, encoder: nn.Module, *, hidden: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self._hidden = hidden

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Maps tokens, int64 ``[batch, length]``, to the encoder's first output, and the states before its last layer.

        Returns:
            float32 ``[batch, length, width]`` or, with a projection, ``[batch, width]``; then, with ``hidden``,
            ``[batch, length, width]``.
        """
        outputs = self.encoder(ids, output_hidden_states=True) if self._hidden else self.encoder(ids)
        return (outputs[0], outputs.hidden_states[-2]) if self._hidden else (outputs[0],)


class UnetGraph(nn.Module):
    """The denoiser of Stable Diffusion 1 and 2."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        """Returns the noise in ``sample``, float32 ``[batch, channels, height, width]``, at times ``[batch]``."""
        noise: Tensor = self.unet(sample, timestep, encoder_hidden_states, return_dict=False)[0]
        return noise


class XLUnetGraph(UnetGraph):
    """The denoiser of Stable Diffusion XL, which also takes a vector of the prompt and the sizes of the picture."""

    def forward(  # type: ignore[override]
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, text_embeds: Tensor, time_ids: Tensor
    ) -> Tensor:
        """As `UnetGraph.forward`, with ``text_embeds`` ``[batch, width]`` and ``time_ids`` ``[batch, 6]``."""
        added = {"text_embeds": text_embeds, "time_ids": time_ids}
        noise: Tensor = self.unet(sample, timestep, encoder_hidden_states, added_cond_kwargs=added, return_dict=False)[
            0
        ]
        return noise


class TransformerGraph(nn.Module):
    """The denoiser of Stable Diffusion 3."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, pooled_projections: Tensor
    ) -> Tensor:
        """As `UnetGraph.forward`, with ``pooled_projections`` ``[batch, width]``."""
        noise: Tensor = self.transformer(
            hidden_states=sample, timestep=timestep, encoder_hidden_states=encoder_hidden_states,
            pooled_projections=pooled_projections, return_dict=False,
        )[0]  # fmt: skip
        return noise


class VaeDecoderGraph(nn.Module):
    """The half of a VAE that makes pixels."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, latents: Tensor) -> Tensor:
        """Maps latents, float32 ``[batch, channels, height, width]``, to pixels ``[batch, 3, ...]`` in -1..1."""
        vae: Any = self.vae
        pixels: Tensor = vae.decode(latents, return_dict=False)[0]
        return pixels


class VaeEncoderGraph(nn.Module):
    """The half of a VAE that reads pixels."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, pixels: Tensor) -> Tensor:
        """Maps pixels in -1..1 to mean and logarithm of the variance of the latents, side by side as channels."""
        vae: Any = self.vae
        moments: Tensor = vae.encode(pixels, return_dict=False)[0].parameters
        return moments


class SafetyGraph(nn.Module):
    """The safety checker, up to the similarities with its concepts."""

    def __init__(self, checker: nn.Module) -> None:
        super().__init__()
        self.checker = checker

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Maps float32 ``[batch, 3, height, width]`` to cosines with the special-care and with all other concepts."""
        checker: Any = self.checker
        vectors = nn.functional.normalize(checker.visual_projection(checker.vision_model(pixels)[1]))
        special = nn.functional.normalize(checker.special_care_embeds)
        concepts = nn.functional.normalize(checker.concept_embeds)
        return vectors @ special.t(), vectors @ concepts.t()


class StandIn:
    """What a pipeline holds in a model's place: it has the model's attributes, and calls its graphs.

    Args:
        model: The model.
        calls: Its graphs by name.
    """

    def __init__(self, model: nn.Module, calls: Mapping[str, GraphCalls]) -> None:
        self._model, self._calls = model, calls

    def __getattr__(self, name: str) -> Any:
        if name in {"_model", "_calls"}:
            raise AttributeError(name)
        return getattr(self._model, name)


class Encoded:
    """A text encoder's output, as pipelines read it: ``[0]`` and ``hidden_states[-2]``."""

    def __init__(self, states: Sequence[Tensor]) -> None:
        self._first = states[0]
        self.hidden_states = (*states[1:], None)

    def __getitem__(self, index: int) -> Tensor:
        if index != 0:
            raise IndexError(f"pipelines read output 0 of a text encoder, not {index}")
        return self._first


class TextStandIn(StandIn):
    """Stands for a text encoder."""

    def __call__(self, ids: Tensor, attention_mask: None = None, output_hidden_states: bool = False) -> Encoded:
        """Encodes tokens; pipelines of these families pass no mask."""
        return Encoded(self._calls["text"](ids=ids))


class UnetStandIn(StandIn):
    """Stands for a unet."""

    def __call__(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        timestep_cond: None = None,
        cross_attention_kwargs: None = None,
        added_cond_kwargs: Mapping[str, Tensor] | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Returns the noise. Schedulers count time in integers or floats; the unet computes in floats in any case."""
        times = timestep.to(torch.float32).expand(sample.shape[0])
        added = dict(added_cond_kwargs or {})
        return (
            self._calls["denoiser"](
                sample=sample, timestep=times, encoder_hidden_states=encoder_hidden_states, **added
            ),
        )


class TransformerStandIn(StandIn):
    """Stands for the transformer of Stable Diffusion 3."""

    def __call__(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        pooled_projections: Tensor,
        joint_attention_kwargs: None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Returns the noise."""
        return (
            self._calls["denoiser"](
                sample=hidden_states, timestep=timestep.to(torch.float32),
                encoder_hidden_states=encoder_hidden_states, pooled_projections=pooled_projections,
            ),
        )  # fmt: skip


class VaeStandIn(StandIn):
    """Stands for a VAE."""

    def decode(self, latents: Tensor, return_dict: bool = False, generator: Any = None) -> tuple[Tensor]:
        """Returns the pixels."""
        return (self._calls["decoder"](latents=latents),)

    def encode(self, pixels: Tensor) -> Any:
        """Returns the distribution of the latents."""
        # Imported here: diffusers takes seconds, which only workers of this task need.
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        return AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(self._calls["encoder"](pixels=pixels)))


class SafetyStandIn(StandIn):
    """Stands for the safety checker; it flags pictures, and leaves them as they are."""

    def __call__(self, images: Tensor, clip_input: Tensor) -> tuple[Tensor, list[bool]]:
        """Returns the pictures, and whether each is flagged, by the thresholds of the checker's own forward."""
        special, concepts = self._calls["safety"](pixels=clip_input)
        care, weights = self._model.special_care_embeds_weights, self._model.concept_embeds_weights
        flags = []
        for near_special, near_concepts in zip(special, concepts, strict=True):
            # As diffusers does: values are rounded to three digits, and one special concept lowers all thresholds.
            lowered = 0.01 if bool((_rounded(near_special - care) > 0).any()) else 0.0
            flags.append(bool((_rounded(near_concepts - weights + lowered) > 0).any()))
        return images, flags


def _rounded(values: Tensor) -> Tensor:
    return torch.round(values, decimals=3)
