"""Attention, normalization and losses, and PyTorch's fused inference kernels for transformers.

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` use a fused native kernel in evaluation mode, which torch does
not decompose. The formulas are those of the modules' slow path (torch/nn/modules/transformer.py,
torch/nn/functional.py).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from torchserve_openvino.ops.opaque_ops import multilabel_margin_loss
from torchserve_openvino.ops.rule_registry import (
    FAILS,
    INSTEAD,
    Decomposition,
    Rule,
    TracedCall,
    declare,
    decomposition,
)

aten = torch.ops.aten


# --- normalization, log-sigmoid -------------------------------------------------------------------------------------


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> tuple[Any, ...]:
    return torch.batch_norm(x, weight, bias, mean, var, False, momentum, eps, False), None, None


def _layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Any, None, None]:
    return torch.layer_norm(x, shape, weight, bias, eps), None, None


def _group_norm(x: Any, weight: Any, bias: Any, n: int, c: int, hxw: int, group: int, eps: float) -> tuple[Any, ...]:
    return torch.group_norm(x, group, weight, bias, eps), None, None


# torch.compile meets it in `ops.opaque_ops` before this table is asked, torch.export here.
declare(Rule(decompose=multilabel_margin_loss), aten.multilabel_margin_loss_forward.default)
_STATISTICS = "a mean or reciprocal deviation"
declare(
    Rule(first_output_only=_STATISTICS, traced=TracedCall("layer_norm", _layer_norm)),
    aten.native_layer_norm.default,
)
declare(
    Rule(first_output_only=_STATISTICS, traced=TracedCall("group_norm", _group_norm, sized=True)),
    aten.native_group_norm.default,
)
declare(Rule(traced=TracedCall("batch_norm", _batch_norm)), aten._native_batch_norm_legit_no_training.default)
declare(Rule(banned=FAILS + " for statistics that change" + INSTEAD), aten._native_batch_norm_legit_functional.default)


def _of_plain_memory(op: Any) -> Decomposition:
    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        for memory_format in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d):
            if x.is_contiguous(memory_format=memory_format):
                return NotImplemented
        return op(x.contiguous(), *args, **kwargs)

    return decomposed


declare(
    Rule(
        banned="OpenVINO answers -inf below -88, where torch gives the input back" + INSTEAD,
        traced=TracedCall("log_sigmoid", lambda x: (F.logsigmoid(x), None)),
    ),
    aten.log_sigmoid_forward.default,
)
# Their kernels return contiguous or channels-last memory, whatever the layout of their input.
for _op in (
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._batch_norm_with_update_functional.default,
    aten.native_batch_norm.default,
    aten.log_sigmoid_forward.default,
):
    declare(Rule(decompose_strided=_of_plain_memory(_op)), _op)


# --- losses -------------------------------------------------------------------------------------------------------

declare(Rule(ordered_as=lambda x, *_: torch.empty_like(x)), aten.huber_loss.default)
# Its kernel raises for probabilities above 1; torch's decomposition does not.
declare(Rule(never_decomposed=True), aten.binary_cross_entropy)


def _nll_loss(x: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Makes the inputs contiguous: the kernel's result always is, that of the decomposition follows its inputs."""
    if x.is_contiguous() and target.is_contiguous():
        return NotImplemented
    return aten.nll_loss2d_forward.default(x.contiguous(), target.contiguous(), *args, **kwargs)


declare(Rule(decompose_strided=_nll_loss), aten.nll_loss2d_forward.default)


# --- attention ----------------------------------------------------------------------------------------------------


declare(Rule(traced=TracedCall("softmax", lambda x, dim, _half: torch.softmax(x, dim))), aten._softmax.default)
declare(
    Rule(traced=TracedCall("log_softmax", lambda x, dim, _half: torch.log_softmax(x, dim))), aten._log_softmax.default
)
declare(Rule(banned="OpenVINO answers NaN for a row of -inf, torch 0" + INSTEAD), aten._safe_softmax.default)


def _drops_out(node: Node) -> bool:
    dropout = node.args[3] if len(node.args) > 3 else node.kwargs.get("dropout_p", 0.0)
    return not (isinstance(dropout, (int, float)) and dropout == 0)


def _traced_attention(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False, *, attn_mask: Any = None, scale: Any = None
) -> tuple[Any, None]:
    # The support table accepts it only without dropout.
    return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale), None


# torch's core table would decompose it into two matrix products and a softmax.
@decomposition(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    rule=Rule(
        kept_whole=True,
        draws=_drops_out,
        first_output_only="the log-sum-exp output",
        traced=TracedCall("scaled_dot_product_attention", _traced_attention),
    ),
)
def _grouped_queries(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Repeats heads of keys and values that several heads of queries share, and makes a mask for queries before keys.

    OpenVINO's attention needs keys and values for each head.

    torch's kernel knows shared heads by the shapes alone (``enable_gqa``).

    Args:
        query: ``[batch, heads, length, features]``.
        key: ``[batch, shared heads, length, features]``.
        value: As ``key``.
    """
    attend = aten._scaled_dot_product_flash_attention_for_cpu.default
    queries, keys = query.shape[2], key.shape[2]
    if is_causal and type(queries) is type(keys) is int and queries != keys:
        # In bfloat16, the plugin computes NaN of a single query and its own mask.
        seen = torch.ones(queries, keys, dtype=torch.bool).tril()
        return attend(query, key, value, dropout_p, False, attn_mask=seen, scale=scale)
    heads, shared = query.shape[1], key.shape[1]
    if heads == shared and heads == value.shape[1]:
        return NotImplemented

    def repeated(x: Tensor) -> Tensor:
        batch, own, length, features = x.shape
        wide = x.unsqueeze(2).expand(batch, own, heads // own, length, features)
        return wide.reshape(batch, heads, length, features)

    return attend(query, repeated(key), repeated(value), dropout_p, is_causal, attn_mask=attn_mask, scale=scale)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    mask: Tensor | None,
    mask_type: int | None,
) -> tuple[Tensor, Tensor]:
    """Computes self- or cross-attention on ``[batch, length, features]``, with the attention weights as second result.

    Args:
        weights: Packed input projection ``[3 * features, features]`` and its bias, output projection and its bias.
        mask: Boolean, True where attention is forbidden.
        mask_type: 0: ``[length, length]``; 1: key padding ``[batch, length]``; 2: full, broadcastable to
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
        # The modules turn every mask into a float mask of 0 and -inf: anything but 0 forbids.
        forbidden = mask.to(torch.bool)
        scores = scores.masked_fill(forbidden, float("-inf"))
    shares = scores.softmax(-1)
    heads_joined = shares @ project(value, 2)
    if mask is not None:
        # For a fully masked row the kernel returns NaN; OpenVINO's fused attention would return 0.
        heads_joined = torch.where(torch.all(forbidden, -1, True), float("nan"), heads_joined)
    joined = heads_joined.transpose(1, 2).reshape(query.shape[0], query.shape[1], features)
    return F.linear(joined, out_weight, out_bias), shares


@decomposition(aten._native_multi_head_attention.default)
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


@decomposition(
    aten._transformer_encoder_layer_fwd.default, rule=Rule(ordered_as=lambda src, *_, **__: src.contiguous())
)
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
        return x + feed(norm_2(x))
    x = norm_1(src + attend(src))
    return norm_2(x + feed(x))
