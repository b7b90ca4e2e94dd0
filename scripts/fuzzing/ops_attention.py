"""Attention with all kinds of masks, including fully masked rows."""

from __future__ import annotations

import torch

from fuzzing.context import Context
from fuzzing.draft import Draft, Skip, Val
from fuzzing.registry import op, size_name, wide_value


@op(2.5)
def attention(g: Context) -> Draft:
    """F.scaled_dot_product_attention with all kinds of masks, including fully masked rows."""
    heads = g.chance(0.6)
    query = _attended(g, 4 if heads else 3)
    value = g.take(lambda v: v.shape == query.shape and v.dtype == query.dtype) if g.chance(0.7) else query
    mask = g.choice(["none", "causal", "mask_bool", "mask_bool", "mask_inf", "mask_min"])
    if mask == "none":
        scale = ", scale=0.3" if g.chance(0.3) else ""
        return Draft(f"F.scaled_dot_product_attention({{0}}, {{1}}, {{1}}{scale})", [query, value])
    if mask == "causal":
        return Draft("F.scaled_dot_product_attention({0}, {1}, {0}, is_causal=True)", [query, value])
    length = size_name(g, query.shape[-2])
    dtype = "bool" if mask == "mask_bool" else str(query.dtype).removeprefix("torch.")
    mask_ = g.input([length, length], dtype, mask)
    return Draft("F.scaled_dot_product_attention({0}, {1}, {1}, attn_mask={2})", [query, value, mask_])


@op(0.7)
def attention_of_tokens(g: Context) -> Draft:
    """Attention over the second dimension with heads in the third, the layout that projections give."""
    value = _attended(g, 4)
    heads = "{0}.transpose(1, 2)"
    form = g.choice(["{1}", "{0} + {1}", "torch.sigmoid({0}) * {1}"])
    attended = f"F.scaled_dot_product_attention({heads}, {heads}, {heads}).transpose(1, 2)"
    return Draft(form.replace("{1}", attended), [value])


@op(1.0)
def attention_by_hand(g: Context) -> Draft:
    query = _attended(g, 3)
    length = size_name(g, query.shape[-2])
    mask = g.input([length, length], "bool", "mask_bool")
    low = g.choice(["-1e4", "torch.finfo({0}.dtype).min"])
    return Draft(f"torch.softmax((({{0}} @ {{0}}.transpose(-1, -2)) * 0.5).masked_fill(~{{1}}, {low}), -1) @ {{0}}",
                 [query, mask])  # fmt: skip


@op(0.8)
def multihead(g: Context) -> Draft:
    value = wide_value(g, 3)
    if value.shape[-1] % 2 or value.dtype is not torch.float32:
        raise Skip
    size = value.shape[-1]
    name = g.attribute("m", f"torch.nn.MultiheadAttention({size}, 2, batch_first=True)")
    if g.chance(0.5):
        mask = g.input([size_name(g, s) for s in value.shape[:2]], "bool", "bool")
        weights = f"need_weights={g.chance(0.5)}"
        padding = "key_padding_mask={1} & (torch.arange({1}.shape[1]) > 0)"
        return Draft(f"self.{name}({{0}}, {{0}}, {{0}}, {padding}, {weights})[0]", [value, mask], uses=(name,))
    return Draft(f"self.{name}({{0}}, {{0}}, {{0}})", [value], out=2, uses=(name,))


@op(0.5)
def encoder_layer(g: Context) -> Draft:
    value = wide_value(g, 3)
    if value.shape[-1] % 2 or value.dtype is not torch.float32:
        raise Skip
    first = f", norm_first={g.chance(0.5)}"
    name = g.attribute("m", f"torch.nn.TransformerEncoderLayer({value.shape[-1]}, 2, 8, 0.0, batch_first=True{first})")
    return Draft(f"self.{name}({{0}})", [value], uses=(name,))


def _attended(g: Context, dim: int) -> Val:
    fits = [v for v in g.values if v.is_float and v.dim == dim and min(v.shape) > 0 and v.tensor.numel() <= 512]
    if fits and g.chance(0.7):
        return g.choice(fits)
    return g.input(["B", 2, "S", 4] if dim == 4 else ["B", "S", 4], g.float_dtype, "normal")
