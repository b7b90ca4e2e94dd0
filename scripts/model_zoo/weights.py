"""Random weights with which every part of a model shows in its answer."""

from __future__ import annotations

import torch

# As transformers initializes most weights, scores of attention are all alike, and a wrong attention would not show.
_SMALL = 0.5


def draw(model: torch.nn.Module, seed: int = 0) -> None:
    """Draws weights so that activations keep a size of about 1, and norms and biases differ from 1 and 0.

    Parameters that are not small when the model is built (decays of state spaces, for example) stay as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    # With parametrizations; other weights of three dimensions are matrices side by side, as those of experts.
    convolutions = {
        parameter
        for module in model.modules()
        if isinstance(module, torch.nn.modules.conv._ConvNd)
        for parameter in module.parameters()
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if parameter.dim() < 2:
                if name.endswith(("weight", "bias", "gamma", "beta")):
                    parameter.add_(0.1 * noise)
            elif parameter in tables:
                parameter.copy_(noise)
            elif float(parameter.std()) < _SMALL:
                is_whole = parameter.dim() != 3 or parameter in convolutions
                inner = parameter[0].numel() if is_whole else parameter.shape[-1]
                parameter.copy_(noise / max(1, inner) ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
