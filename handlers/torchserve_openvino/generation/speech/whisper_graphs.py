"""The parts of a Whisper model that are compiled, each as a module that takes and returns tensors only."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Tensors of each layer of the decoder: keys and values of tokens, keys and values of sound.
KINDS = 4


class WhisperEncoderGraph(nn.Module):
    """The encoder.

    Args:
        model: A `WhisperForConditionalGeneration`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.model.encoder

    def forward(self, features: Tensor) -> Tensor:
        """Maps spectrograms ``[batch, mel bins, frames]`` to states ``[batch, positions, width]``."""
        states: Tensor = self.encoder(features).last_hidden_state
        return states


class SoundGraph(nn.Module):
    """What the decoder reads of the encoder's states: keys and values, made once for each window of sound.

    Args:
        model: A `WhisperForConditionalGeneration`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(layer.encoder_attn for layer in model.model.decoder.layers)

    def forward(self, states: Tensor) -> tuple[Tensor, ...]:
        """Returns keys and values of each layer in turn, ``[batch, heads, positions, width of a head]``."""
        memory: list[Tensor] = []
        for attention in self.attentions:
            memory += _keys_and_values(attention, states)
        return tuple(memory)


class WhisperDecoderGraph(nn.Module):
    """The decoder for some new tokens after those that a cache of fixed size holds.

    transformers' decoder writes into its cache while it runs. This one gets the cache as inputs and returns what is to
    be added, so that each call of a graph depends on its inputs only.

    Args:
        model: A `WhisperForConditionalGeneration`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder = model.model.decoder
        self.head = model.proj_out

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Runs the decoder.

        Args:
            ids: New tokens, int64 ``[batch, new]``.
            positions: Their positions, int64 ``[batch, new]``.
            mask: What is added to scores, ``[batch, 1, new, length + new]``: a large negative number hides a token.
                The cache comes first, then the new tokens.
            past: For each layer keys and values of tokens ``[batch, heads, length, width of a head]``, then keys and
                values of sound ``[batch, heads, positions, width of a head]``.

        Returns:
            Logits ``[batch, new, vocabulary]``, then keys and values of the new tokens, for each layer in turn.
        """
        decoder: Any = self.decoder
        hidden = decoder.embed_tokens(ids) + decoder.embed_positions.weight[positions]
        added: list[Tensor] = []
        for number, layer in enumerate(decoder.layers):
            hidden, new = _layer(layer, hidden, mask, past[number * KINDS : (number + 1) * KINDS])
            added += new
        return (self.head(decoder.layer_norm(hidden)), *added)


def _layer(layer: Any, hidden: Tensor, mask: Tensor, past: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Runs one layer of the decoder, as transformers' `WhisperDecoderLayer` does; returns its new keys and values."""
    keys, values, sound_keys, sound_values = past
    inner = layer.self_attn_layer_norm(hidden)
    new = _keys_and_values(layer.self_attn, inner)
    together = torch.cat([keys, new[0]], dim=2), torch.cat([values, new[1]], dim=2)
    hidden = hidden + _attended(layer.self_attn, inner, *together, mask)
    inner = layer.encoder_attn_layer_norm(hidden)
    hidden = hidden + _attended(layer.encoder_attn, inner, sound_keys, sound_values, None)
    inner = layer.final_layer_norm(hidden)
    return hidden + layer.fc2(layer.activation_fn(layer.fc1(inner))), new


def _keys_and_values(attention: Any, hidden: Tensor) -> list[Tensor]:
    return [_heads(attention, attention.k_proj(hidden)), _heads(attention, attention.v_proj(hidden))]


def _heads(attention: Any, x: Tensor) -> Tensor:
    """Maps ``[batch, length, width]`` to ``[batch, heads, length, width of a head]``."""
    return x.view(x.shape[0], x.shape[1], attention.num_heads, attention.head_dim).transpose(1, 2).contiguous()


def _attended(attention: Any, hidden: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    # Queries are scaled before they are multiplied, as transformers does, which rounds otherwise.
    queries = _heads(attention, attention.q_proj(hidden) * attention.scaling)
    attended = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=1.0)
    mixed: Tensor = attention.out_proj(attended.transpose(1, 2).reshape(hidden.shape))
    return mixed
