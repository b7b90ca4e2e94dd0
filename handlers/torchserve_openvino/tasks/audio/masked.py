"""Makes a model's answer to a padded recording that to the recording alone, where a mask alone does not."""

from typing import Any

import torch
from torch import nn


class MaskedEncoder(nn.Module):
    """A wav2vec 2.0 feature encoder whose group norm does not see the padding.

    The first layer of these encoders (``feat_extract_norm: group``) normalises each channel over time, so that zeros
    behind a recording change all its frames. Here the mean and the variance are those of the recording's own frames.
    The layers after it are convolutions without padding, whose frames depend on samples of the recording only.

    Models pass nothing but samples to their encoder: the mask comes as a second channel.

    Args:
        encoder: The model's encoder.
    """

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.train(encoder.training)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Maps samples and mask ``[batch, 2, samples]`` to features ``[batch, channels, frames]``."""
        first, *others = self.encoder.conv_layers
        hidden = first.conv(values[:, :1])
        samples = values[:, 1].to(torch.int64).sum(-1)
        frames = torch.div(samples - first.conv.kernel_size[0], first.conv.stride[0], rounding_mode="floor") + 1
        hidden = first.activation(_normalised(hidden, frames, first.layer_norm))
        for layer in others:
            hidden = layer(hidden)
        return hidden


def _normalised(hidden: torch.Tensor, frames: torch.Tensor, norm: nn.GroupNorm) -> torch.Tensor:
    """Applies a group norm of one channel in each group to the first frames of each row."""
    real = (torch.arange(hidden.shape[-1], device=hidden.device) < frames[:, None])[:, None]
    count = frames.clamp(min=1)[:, None, None].to(hidden.dtype)
    mean = torch.where(real, hidden, 0.0).sum(-1, keepdim=True) / count
    centred = torch.where(real, hidden - mean, 0.0)
    variance = centred.square().sum(-1, keepdim=True) / count
    return centred * torch.rsqrt(variance + norm.eps) * norm.weight[:, None] + norm.bias[:, None]


def mask_group_norm(model: Any) -> bool:
    """Replaces a model's feature encoder by a `MaskedEncoder` if its first layer has a group norm over time.

    Returns:
        Whether it did, and the model takes ``[batch, 2, samples]`` now.
    """
    encoder = getattr(model.base_model, "feature_extractor", None)
    layers = getattr(encoder, "conv_layers", None)
    norm = getattr(layers[0], "layer_norm", None) if layers else None
    if not isinstance(norm, nn.GroupNorm) or norm.num_groups != norm.num_channels:
        return False
    model.base_model.feature_extractor = MaskedEncoder(encoder)
    return True
