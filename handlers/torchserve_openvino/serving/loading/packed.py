"""Loads a quantized Hugging Face folder as the model in float32 that it stands for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.quantized.checkpoint import Checkpoint
from torchserve_openvino.quantized.scheme import SECTION, Scheme

_GENERATION = "generation_config.json"


def load_dequantized(
    folder: Path, scheme: Scheme, config: Any, loader: Any, how: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:  # fmt: skip
    """Loads a model whose linear layers are packed; no library of the method is needed.

    Args:
        folder: Has config.json and safetensors.
        scheme: How the layers are packed.
        config: The model's configuration, from transformers; changed.
        loader: A class of transformers, such as ``AutoModelForCausalLM``.
        how: Further arguments of ``from_pretrained``.

    Returns:
        The model in float32, and what transformers says of missing, unexpected and mismatched weights.

    Raises:
        ModelLoadError: A layer can't be unpacked, the model has no such layer, or the checkpoint has numbers beside its
            layers that the model would not use.
    """
    checkpoint = Checkpoint(folder, scheme)
    # With it, transformers would look for a library of the method.
    delattr(config, SECTION)
    with torch.device("meta"):
        empty = getattr(loader, "from_config", loader)(config)
    places = _places(empty, checkpoint.names)
    state = checkpoint.dequantized(lambda name: _is_by_column(empty.get_submodule(places[name])))
    model, info = type(empty).from_pretrained(
        None, config=config, state_dict=dict(state), dtype=torch.float32, **how
    )  # fmt: skip
    if model.can_generate() and (folder / _GENERATION).is_file():
        model.generation_config = _generation_config(folder)
    for name in sorted(info.get("unexpected_keys", ())):
        _check_unused(name, state.get(name))
    for name, path in places.items():
        _check_used(name, state[f"{name}.weight"], model.get_submodule(path).weight)
    return model, info


def _generation_config(folder: Path) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig.from_pretrained(folder, local_files_only=True)


def _places(model: Any, names: list[str]) -> dict[str, str]:
    """Returns where the model has each packed layer.

    Raises:
        ModelLoadError: It has no linear layer of some name.
    """
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."
    locations = {}
    for name in names:
        # The checkpoint of a task's model may be loaded into the bare one, and the other way round.
        tried = (name, prefix + name, name.removeprefix(prefix))
        path = next((name for name in tried if isinstance(modules.get(name), nn.Linear)), None)
        path = path or next((name for name in tried if _is_by_column(modules.get(name))), None)
        if path is None:
            raise ModelLoadError(f"{type(model).__name__} has no linear layer {name}, which the checkpoint packs.")
        locations[name] = path
    return locations


def _is_by_column(layer: Any) -> bool:
    """Whether a layer is one of GPT-2's, whose weight is ``[in, out]``."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D)


def _check_used(name: str, stored: Tensor, used: Tensor) -> None:
    """Refuses a layer whose weight the model shares with another one. Sizes that do not fit are refused elsewhere."""
    if stored.shape == used.shape and not torch.equal(stored, used):
        raise ModelLoadError(f"{name} is packed, but the model takes another weight for it (tie_word_embeddings).")


def _check_unused(name: str, tensor: Tensor | None) -> None:
    """Refuses numbers that the model would silently lack: AutoGPTQ adds biases of 0, AutoAWQ scales of 1."""
    neutral = {"bias": 0, "scales": 1}.get(name.rpartition(".")[2])
    if neutral is not None and tensor is not None and bool((tensor != neutral).any()):
        raise ModelLoadError(f"{name} of the checkpoint is not {neutral} throughout, and the model does not use it.")
