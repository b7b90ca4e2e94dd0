"""MiniLM-L6, the sentence encoder, in plain PyTorch: importing transformers would cost each worker seconds.

Modules have Hugging Face's names, so that `model.safetensors` of all-MiniLM-L6-v2 loads unchanged.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

HIDDEN, HEADS, LAYERS, INNER = 384, 12, 6, 1536
VOCABULARY, POSITIONS, SEGMENTS = 30522, 512, 2


@functools.cache
def _unset(kind: type[nn.Module]) -> Callable[..., nn.Module]:
    """A module class without random initialization: all weights are loaded, and drawing them would take longer."""

    # Inside a function, since TorchServe requires one class in a model's file.
    class Unset(kind):  # type: ignore[valid-type, misc]
        def reset_parameters(self) -> None:
            pass

    return Unset


def _linear(inputs: int, outputs: int) -> nn.Module:
    return _unset(nn.Linear)(inputs, outputs)


def _norm() -> nn.LayerNorm:
    return nn.LayerNorm(HIDDEN, eps=1e-12)


def _layer() -> nn.ModuleDict:
    """One layer of the encoder: a container of named modules, which `MiniLM` calls."""
    projections = {name: _linear(HIDDEN, HIDDEN) for name in ("query", "key", "value")}
    attended = {"dense": _linear(HIDDEN, HIDDEN), "LayerNorm": _norm()}
    return nn.ModuleDict(
        {
            "attention": nn.ModuleDict({"self": nn.ModuleDict(projections), "output": nn.ModuleDict(attended)}),
            "intermediate": nn.ModuleDict({"dense": _linear(HIDDEN, INNER)}),
            "output": nn.ModuleDict({"dense": _linear(INNER, HIDDEN), "LayerNorm": _norm()}),
        }
    )


class MiniLM(nn.Module):
    """Maps token ids and their mask, both int64 (N, length), to one float32 vector per token (N, length, 384)."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": _unset(nn.Embedding)(VOCABULARY, HIDDEN),
                "position_embeddings": _unset(nn.Embedding)(POSITIONS, HIDDEN),
                "token_type_embeddings": _unset(nn.Embedding)(SEGMENTS, HIDDEN),
                "LayerNorm": _norm(),
            }
        )
        self.embeddings.register_buffer("position_ids", torch.arange(POSITIONS).unsqueeze(0))
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(_layer() for _ in range(LAYERS))})
        # In the checkpoint, but not used by `forward`.
        self.pooler = nn.ModuleDict({"dense": _linear(HIDDEN, HIDDEN)})

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The last layer's hidden state; tokens whose mask is 0 are ignored."""
        parts = self.embeddings
        places = parts.get_buffer("position_ids")[:, : input_ids.shape[1]]
        # All tokens belong to the first segment.
        hidden = parts["word_embeddings"](input_ids) + parts.get_parameter("token_type_embeddings.weight")[0]
        hidden = parts["LayerNorm"](hidden + parts["position_embeddings"](places))
        seen = attention_mask[:, None, None, :] != 0
        for layer in self.encoder["layer"].children():
            hidden = self._attend(layer.get_submodule("attention"), hidden, seen)
            inner = gelu(layer.get_submodule("intermediate.dense")(hidden))
            hidden = layer.get_submodule("output.LayerNorm")(layer.get_submodule("output.dense")(inner) + hidden)
        return hidden

    def _attend(self, attention: nn.Module, hidden: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            attention.get_submodule(f"self.{name}")(hidden).view(batch, length, HEADS, -1).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=seen)
        mixed = mixed.transpose(1, 2).reshape(batch, length, HIDDEN)
        return attention.get_submodule("output.LayerNorm")(attention.get_submodule("output.dense")(mixed) + hidden)
