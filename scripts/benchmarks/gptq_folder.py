"""Writes a language model as a GPTQ checkpoint of 4 bits, by rounding: as fast to decode as GPTQ's own choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_BITS, _MIDDLE, _PER_WORD = 4, 8, 8


def save_gptq(folder: Path, model: Any, group_size: int = 128) -> None:
    """Saves a model of transformers, symmetric around 0, its embeddings and last layer in float16.

    Args:
        folder: Where to.
        model: Its linear layers have rows of a multiple of ``group_size``.
        group_size: How many weights of a row share a scale.
    """
    from safetensors.torch import save_file
    from torch import nn

    tensors = {name: tensor.half() for name, tensor in model.state_dict().items()}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            weight = tensors.pop(f"{name}.weight").float()
            tensors |= {f"{name}.{part}": tensor for part, tensor in _packed(weight, group_size).items()}
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "gptq", "bits": _BITS, "group_size": group_size, "sym": True, "checkpoint_format": "gptq_v2",
    }  # fmt: skip
    path.write_text(json.dumps(config), encoding="utf-8")


def _packed(weight: Tensor, group_size: int) -> dict[str, Tensor]:
    import torch

    rows, columns = weight.shape
    groups = weight.view(rows, -1, group_size)
    scales = (groups.abs().amax(-1) / (_MIDDLE - 1)).half()
    numbers = (groups / scales.float()[..., None]).round() + _MIDDLE
    values = numbers.clamp(0, 15).to(torch.int64).view(rows, columns)
    zeros = torch.full((columns // group_size, rows), _MIDDLE, dtype=torch.int64)
    return {
        "qweight": _words(values).t().contiguous(),
        "qzeros": _words(zeros),
        "scales": scales.t().contiguous(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // group_size,
    }


def _words(values: Tensor) -> Tensor:
    """Packs eight numbers of a row into one word of 32 bits, the first into the lowest bits."""
    import torch

    eights = values.view(values.shape[0], -1, _PER_WORD)
    words = (eights << torch.arange(0, 32, _BITS)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
