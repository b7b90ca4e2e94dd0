"""Attention at real sizes: layouts, masks of each form, hand-written and fused, and what follows it."""

from __future__ import annotations

from fuzzing.draft import Skip, Val
from fuzzing.real_context import RealContext
from fuzzing.real_inputs import HEADS, tokens
from fuzzing.registry import block

_COUNTS = (1, 1, 2, 2, 3, 4, 6, 8, 12, 16, 32)


@block(5.0, "tokens")
def attention(g: RealContext) -> None:
    """F.scaled_dot_product_attention."""
    query, key, value, queries, keys, heads = _query_key_value(g)
    fused = "F.scaled_dot_product_attention({0}, {1}, {2}"
    scale = ", scale=0.11" if g.chance(0.2) else ""
    form = g.choice(["none", "causal", "mask", "mask", "mask", "mask"])
    if form == "causal":
        result = g.line(f"{fused}, is_causal=True{scale})", query, key, value)
    elif form == "mask":
        forms = ("bool", "bool", "inf", "min", "1e4", "1e9", "bias")
        mask = _mask(g, queries, keys, heads, forms, least=g.choice([0, 0, 1]))
        result = g.line(f"{fused}, attn_mask={{3}}{scale})", query, key, value, mask)
    else:
        result = g.line(f"{fused}{scale})", query, key, value)
    _behind(g, result, queries)


@block(5.0, "tokens")
def attention_by_hand(g: RealContext) -> None:
    """softmax(q k) v with scale, mask, cast and what follows, each as published models write it."""
    query, key, value, queries, keys, heads = _query_key_value(g)
    size = g.named(query.shape[-1])
    scale = g.choice(["none", "query", "scores", "divided", "scores"])
    if scale == "query":
        query = g.line(f"{{0}} * {size} ** -0.5", query)
    product = g.choice(["{0} @ {1}.transpose(-1, -2)", "torch.matmul({0}, {1}.transpose(2, 3))",
                        'torch.einsum("bhld,bhsd->bhls", {0}, {1})'])  # fmt: skip
    scores = g.line(product, query, key)
    if scale in {"scores", "divided"}:
        scores = g.line(f"{{0}} * {size} ** -0.5" if scale == "scores" else f"{{0}} / {size} ** 0.5", scores)
    scores = _masked(g, scores, queries, keys, heads)
    weights = g.line(g.choice([
        "torch.softmax({0}, -1)", "{0}.softmax(dim=-1)", "torch.softmax({0}, -1, dtype=torch.float32).to({0}.dtype)",
        "F.dropout(F.softmax({0}.float(), dim=-1).type_as({0}), 0.1, training=False)",
    ]), scores)  # fmt: skip
    g.infinite = False
    result = g.line(g.choice(["{0} @ {1}", "torch.matmul({0}, {1})", 'torch.einsum("bhls,bhsd->bhld", {0}, {1})']),
                    weights, value)  # fmt: skip
    _behind(g, result, queries)


@block(1.0, "tokens")
def layers_of_one_mask(g: RealContext) -> None:
    """Two layers that add the same mask, computed of 0 and 1 as former transformers and TensorFlow's models do."""
    value = tokens(g)
    if value.dtype.itemsize != 4 or value.shape[-1] % 2:
        raise Skip
    mask = g.input([g.batch_or_length(size) for size in value.shape[:2]], "bool", "padding_bool", 1)
    mask, size = g.line("{0}.to(torch.float32)", mask, exact="move"), g.named(value.shape[-1])
    least = g.choice(["1e4", "1e4", "1e6", "1e9"])
    hidden = g.choice(["(1.0 - {1}[:, None, None]) * -", "({1}[:, None, None] - 1.0) * "])
    for _ in range(2):
        heads = g.line("{0}.view(*{0}.shape[:2], 2, -1).transpose(1, 2)", value, exact="move")
        scores = g.line(f"{{0}} @ {{0}}.transpose(-1, -2) * {size} ** -0.5", heads)
        scores = g.line(f"{{0}} + {hidden}{least}", scores, mask)
        result = g.line("{0}.softmax(-1) @ {1}", scores, heads)
        value = g.line("{0}.transpose(1, 2).reshape({1}.shape)", result, value, exact="move")


@block(1.0, "tokens")
def multihead(g: RealContext) -> None:
    value = tokens(g)
    if value.dtype.itemsize != 4:
        raise Skip
    hidden, heads = g.named(value.shape[-1]), g.choice([1, 2, 4, 8])
    if value.shape[-1] % heads:
        raise Skip
    name = g.layer(f"MultiheadAttention({hidden}, {heads}, batch_first=True)")
    batch, length = (g.batch_or_length(size) for size in value.shape[:2])
    options, masks = "", []
    if g.chance(0.6):
        masks.append(g.input([batch, length], "bool", g.choice(["padding_bool", "left_bool"]), 1))
        options += ", key_padding_mask=~{1}"
    if g.chance(0.3):
        masks.append(g.input([length, length], "bool", "causal_bool", 1))
        options += f", attn_mask=~{{{len(masks)}}}"
    weights = g.chance(0.5)
    code = f"self.{name}({{0}}, {{0}}, {{0}}{options}, need_weights={weights})[0]"
    g.line(code, value, *masks, uses=[name])


@block(0.7, "tokens")
def encoder_layer(g: RealContext) -> None:
    value = tokens(g)
    if value.dtype.itemsize != 4 or value.shape[-1] % 4:
        raise Skip
    hidden, heads = g.named(value.shape[-1]), g.choice([1, 2, 4])
    options = f"dropout=0.0, activation={g.choice(['F.gelu', 'F.relu'])}, batch_first=True, norm_first={g.chance(0.5)}"
    name = g.layer(f"TransformerEncoderLayer({hidden}, {heads}, {hidden} * {g.choice([2, 4])}, {options})")
    batch, length = (g.batch_or_length(size) for size in value.shape[:2])
    mask = g.input([batch, length], "bool", g.choice(["padding_bool", "left_bool"]), 1)
    g.line(f"self.{name}({{0}}, src_key_padding_mask=~{{1}})", value, mask, uses=[name])


@block(1.0, "tokens")
def cached_attention(g: RealContext) -> None:
    """One new token behind a cache of keys and values, which is also returned."""
    heads, size = g.constant(_COUNTS), g.constant(HEADS)
    past_key, past_value = (g.floats(["B", heads, "S", size], ["normal", "outliers"]) for _ in range(2))
    new = [g.floats(["B", heads, 1, size], ["normal"]) for _ in range(3)]
    key = g.line("torch.cat([{0}, {1}], 2)", past_key, new[1], exact="move")
    value = g.line("torch.cat([{0}, {1}], dim=-2)", past_value, new[2], exact="move")
    form = g.choice(["fused", "mask", "hand"])
    if form == "fused":
        result = g.line("F.scaled_dot_product_attention({0}, {1}, {2})", new[0], key, value)
    else:
        kind = "bool" if form == "mask" else g.choice(["min", "1e4"])
        dtype = "bool" if form == "mask" else g.float_dtype
        past = g.input(["B", 1, 1, "S"], dtype, f"{g.choice(['padding', 'left'])}_{kind}", 1)
        mask = g.line("F.pad({0}, (0, 1), value=True)" if form == "mask" else "F.pad({0}, (0, 1))", past, exact="move")
        code = "F.scaled_dot_product_attention({0}, {1}, {2}, attn_mask={3})"
        if form == "hand":
            code = f"torch.softmax({{0}} @ {{1}}.mT * {size} ** -0.5 + {{3}}, -1) @ {{2}}"
        result = g.line(code, new[0], key, value, mask)
    _behind(g, result, 1)


@block(1.5, "tokens")
def rotary(g: RealContext) -> None:
    """Rotary positions, in halves or interleaved, computed from positions or taken from a table."""
    heads, size = g.constant(_COUNTS), g.constant([s for s in HEADS if s % 4 == 0])
    query = g.floats(["B", heads, "S", size], ["normal", "outliers"])
    base = g.choice([10_000.0, 500_000.0])
    steps = g.line(f"1.0 / {base} ** (torch.arange(0, {size}, 2).float() / {size})")
    positions = g.choice(["arange", "input"])
    if positions == "input":
        at = g.input(["B", "S"], "int64", "index", 0, 2048)
        angles = g.line("({0}[:, None, :, None].float() * {1})", at, steps)
    else:
        angles = g.line("torch.outer(torch.arange({0}.shape[2]).float(), {1})[None, None]", query, steps)
    both = "torch.cat([{0}, {0}], -1)"
    cos, sin = (g.line(f"{both}.{name}().to({{1}}.dtype)", angles, query) for name in ("cos", "sin"))
    form = g.choice(["halves", "chunk", "interleaved"])
    if form == "halves":
        turned = g.line(f"torch.cat([-{{0}}[..., {size} // 2:], {{0}}[..., :{size} // 2]], -1)", query)
    elif form == "chunk":
        turned = g.line("torch.cat([-{0}.chunk(2, -1)[1], {0}.chunk(2, -1)[0]], dim=-1)", query)
    else:
        turned = g.line("torch.stack([-{0}[..., 1::2], {0}[..., ::2]], -1).flatten(-2)", query)
    result = g.line("{0} * {1} + {2} * {3}", query, cos, turned, sin)
    if g.chance(0.6):
        g.line(f"F.scaled_dot_product_attention({{0}}, {{0}}, {{1}}, is_causal={g.chance(0.5)})", result, query)


def _query_key_value(g: RealContext) -> tuple[Val, Val, Val, int | str, int | str, str]:
    """Query, key and value [batch, heads, length, size], with the names of both lengths and the number of heads."""
    heads, size = g.constant(_COUNTS), g.constant(HEADS)
    value_size = g.constant(HEADS) if g.chance(0.25) else size
    source = g.choice(["inputs", "inputs", "tokens"])
    if source == "tokens":
        return _projected(g, heads, size)
    queries: int | str = g.choice(["S", "S", "S", "S", 1, 1, g.constant([2, 16, 31, 32, 33, 64, 100])])
    groups = g.choice([2, 4, 8]) if g.chance(0.25) else 1
    kinds = ["normal", "normal", "outliers", "ties"]

    def project(count: str, length: int | str, last: str) -> Val:
        if g.chance(0.3):
            value = g.floats(["B", length, count, last], kinds)
            return g.line("{0}.transpose(1, 2)", value, exact="move")
        return g.floats(["B", count, length, last], kinds)

    query_heads = g.product(f"{heads} * {groups}") if groups > 1 else heads
    query = project(query_heads, queries, size)
    key, value = project(heads, "S", size), project(heads, "S", value_size)
    if groups > 1:
        form = g.choice([f"{{0}}.repeat_interleave({groups}, 1)", f"{{0}}.repeat_interleave({groups}, dim=1)",
                         f"{{0}}[:, :, None].expand(-1, -1, {groups}, -1, -1).flatten(1, 2)"])  # fmt: skip
        key, value = (g.line(form, part, exact="move") for part in (key, value))
    return query, key, value, queries, "S", query_heads


def _projected(g: RealContext, heads: str, size: str) -> tuple[Val, Val, Val, int | str, int | str, str]:
    source = tokens(g)
    length, hidden = g.batch_or_length(source.shape[1]), g.named(source.shape[-1])
    bias = f", bias={g.chance(0.5)}{g.typed}"
    if g.chance(0.4):
        name = g.layer(f"Linear({hidden}, 3 * {heads} * {size}{bias})")
        split = f"self.{name}({{0}}).view(*{{0}}.shape[:2], 3, {heads}, {size}).permute(2, 0, 3, 1, 4)"
        query, key, value = g.lines_of(f"{split}.unbind(0)", 3, source, uses=[name])
    else:
        parts = []
        for _ in range(3):
            name = g.layer(f"Linear({hidden}, {heads} * {size}{bias})")
            code = f"self.{name}({{0}}).view({{0}}.shape[0], -1, {heads}, {size}).transpose(1, 2)"
            parts.append(g.line(code, source, uses=[name]))
        query, key, value = parts
    return query, key, value, length, length, heads


def _mask(g: RealContext, queries: int | str, keys: int | str, heads: str, forms: tuple[str, ...], least: int) -> Val:
    """A mask of one of the published shapes and structures."""
    form = g.choice(forms)
    batch: int | str = g.choice(["B", "B", 1])
    structure = g.choice(["random", "padding", "padding", "left", "causal", "left_causal", "band"])
    if structure in {"padding", "left"}:
        shape = g.choice([[batch, 1, 1, keys], [batch, 1, 1, keys], [batch, 1, queries, keys]])
    elif structure == "left_causal":
        shape = [batch, 1, queries, keys]
    else:
        full = [[batch, 1, queries, keys], [1, 1, queries, keys], [queries, keys], [batch, heads, queries, keys]]
        shape = g.choice(full)
    if form == "bias":
        return g.input(shape, g.float_dtype, g.choice(["normal", "spread", "ties"]))
    if form == "1e9" and g.float_dtype == "float16":
        form = "1e4"
    dtype = "bool" if form == "bool" else g.float_dtype
    return g.input(shape, dtype, f"{structure}_{form}", least)


def _masked(g: RealContext, scores: Val, queries: int | str, keys: int | str, heads: str) -> Val:
    form = g.choice(["none", "added", "added", "filled", "where", "bias"])
    if form == "none":
        return scores
    if form in {"added", "bias"}:
        # With nothing but -inf in a row, eager's softmax is NaN.
        forms = ("inf", "min", "1e4", "1e9") if form == "added" else ("bias",)
        mask = _mask(g, queries, keys, heads, forms, least=1)
        g.infinite = True
        return g.line(g.choice(["{0} + {1}", "{1} + {0}", "{0}.add({1})"]), scores, mask)
    mask = _mask(g, queries, keys, heads, ("bool",), least=1)
    low = g.choice(["torch.finfo({0}.dtype).min", "-1e4", 'float("-inf")', 'float("-inf")'])
    g.infinite = True
    code = f"{{0}}.masked_fill(~{{1}}, {low})" if form == "filled" else f"torch.where({{1}}, {{0}}, {low})"
    return g.line(code, scores, mask)


def _behind(g: RealContext, result: Val, queries: int | str) -> None:
    """What models do with the result of attention."""
    form = g.choice(["nothing", "where", "filled", "scaled", "added", "merged", "projected", "projected"])
    if form in {"where", "filled", "scaled"}:
        shape = g.choice([["B", 1, queries, 1], [1, 1, queries, 1]])
        keep = g.input(shape, "bool", "bool")
        codes = {"where": "torch.where({1}, {0}, 0.0)", "filled": "{0}.masked_fill(~{1}, 0)", "scaled": "{0} * {1}"}
        g.line(codes[form], result, keep)
        return
    if form == "added":
        name = g.weight(g.named(result.shape[-1]))
        g.line(f"{{0}} + self.{name}", result, uses=[name])
        return
    if form == "nothing":
        return
    merged = g.line(g.choice(["{0}.transpose(1, 2).flatten(2)", "{0}.transpose(1, 2).contiguous().flatten(2)",
                              "{0}.permute(0, 2, 1, 3).reshape({0}.shape[0], {0}.shape[2], -1)"]),
                    result, exact="move")  # fmt: skip
    if form == "projected":
        width = g.product(f"{g.named(result.shape[1])} * {g.named(result.shape[-1])}")
        name = g.layer(f"Linear({width}, {width}{g.typed})" if g.chance(0.5) else f"Linear({width}, 64{g.typed})")
        out = g.line(f"self.{name}({{0}})", merged, uses=[name])
        if out.shape == merged.shape and g.chance(0.6):
            g.line("{0} + {1}", out, merged)
