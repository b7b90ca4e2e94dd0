"""Decompositions of PyTorch's fused inference kernels, which torch itself keeps whole.

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` take a fused native kernel in evaluation mode; no table has it.
The formulas are those of the modules' slow path (torch/nn/modules/transformer.py, torch/nn/functional.py).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    mask: Tensor | None,
    mask_type: int | None,
) -> tuple[Tensor, Tensor]:
    """Self- or cross-attention on ``[batch, length, features]``; returns the output and the attention weights.

    Args:
        weights: Packed input projection ``[3 * features, features]`` and its bias, output projection and its bias.
        mask: Boolean, True where attention is forbidden.
        mask_type: 0: ``[length, length]``; 1: key padding ``[batch, length]``; 2: whole, broadcastable to
            ``[batch, heads, length, length]``.
    """
    qkv_weight, qkv_bias, out_weight, out_bias = weights
    features = query.shape[-1]

    def project(x: Tensor, i: int) -> Tensor:
        rows = slice(i * features, (i + 1) * features)
        y = F.linear(x, qkv_weight[rows], qkv_bias[rows])
        return y.view(x.shape[0], x.shape[1], heads, features // heads).transpose(1, 2)

    scores = project(query, 0) @ project(key, 1).transpose(-2, -1) / math.sqrt(features / heads)
    if mask is not None:
        if mask_type == 1:
            mask = mask.view(mask.shape[0], 1, 1, mask.shape[1])
        # The modules make a float mask of 0 and -inf of every mask: anything but 0 forbids.
        forbidden = mask.to(torch.bool)
        scores = scores.masked_fill(forbidden, float("-inf"))
    shares = scores.softmax(-1)
    heads_joined = shares @ project(value, 2)
    if mask is not None:
        # Where all is forbidden the kernel answers NaN; OpenVINO's fused attention would answer 0.
        heads_joined = torch.where(torch.all(forbidden, -1, True), float("nan"), heads_joined)
    joined = heads_joined.transpose(1, 2).reshape(query.shape[0], query.shape[1], features)
    return F.linear(joined, out_weight, out_bias), shares


def _native_multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor]:
    weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    output, shares = _attention(query, key, value, num_head, weights, mask, mask_type)
    if not need_weights:
        return output, query.new_empty(0)
    return output, shares.mean(1) if average_attn_weights else shares


def _transformer_encoder_layer_fwd(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)

    def attend(x: Tensor) -> Tensor:
        return _attention(x, x, x, num_heads, weights, mask, mask_type)[0]

    def feed(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(norm_1(src))
        # The kernel's answer is contiguous, whatever ``src`` is.
        return (x + feed(norm_2(x))).contiguous()
    x = norm_1(src + attend(src))
    return norm_2(x + feed(x))


FAST_PATHS: dict[Any, Callable[..., Any]] = {
    aten._native_multi_head_attention.default: _native_multi_head_attention,
    aten._transformer_encoder_layer_fwd.default: _transformer_encoder_layer_fwd,
}
