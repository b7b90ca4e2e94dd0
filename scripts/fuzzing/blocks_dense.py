"""Blocks of language models at real sizes: gated products, norms, routers, vocabularies, pooling over tokens."""

from __future__ import annotations

from fuzzing.draft import Skip, Val
from fuzzing.real_context import RealContext
from fuzzing.real_inputs import HIDDEN, VOCABULARIES, ids, tokens, vectors
from fuzzing.registry import block

_ACTIVATIONS = ("F.silu({0})", "F.gelu({0})", 'F.gelu({0}, approximate="tanh")', "torch.sigmoid({0})", "F.relu({0})",
                "{0} * torch.sigmoid({0})", "{0} * torch.sigmoid(1.702 * {0})", "F.mish({0})", "torch.tanh({0})",
                "torch.relu({0}).square()", "0.5 * {0} * (1.0 + torch.erf({0} / 2.0 ** 0.5))", "F.softplus({0})",
                "0.5 * {0} * (1.0 + torch.tanh(0.7978845608 * ({0} + 0.044715 * {0} ** 3)))",
                "F.hardswish({0})")  # fmt: skip


def activated(g: RealContext, value: Val) -> Val:
    return g.line(g.choice(_ACTIVATIONS), value)


def _rows(g: RealContext) -> Val:
    return tokens(g) if g.chance(0.75) else vectors(g)


@block(3.0, "tokens")
def gated(g: RealContext) -> None:
    """SwiGLU, GEGLU and GLU: two products of an input, one through an activation, multiplied."""
    value = _rows(g)
    hidden = g.named(value.shape[-1])
    inner = g.constant([s for s in (*HIDDEN, 5632, 11008) if s >= value.shape[-1] // 2] or HIDDEN)
    bias = f", bias={g.chance(0.3)}{g.typed}"
    form = g.choice(["two", "two", "two", "chunk", "glu"])
    if form == "two":
        gate, up = (g.layer(f"Linear({hidden}, {inner}{bias})") for _ in range(2))
        first = g.line(f"self.{gate}({{0}})", value, uses=[gate])
        second = g.line(f"self.{up}({{0}})", value, uses=[up])
        product = g.line("{0} * {1}", activated(g, first), second)
    else:
        name = g.layer(f"Linear({hidden}, 2 * {inner}{bias})")
        both = g.line(f"self.{name}({{0}})", value, uses=[name])
        if form == "glu":
            product = g.line("F.glu({0})", both)
        else:
            first, second = g.lines_of("{0}.chunk(2, dim=-1)", 2, both, exact="move")
            product = g.line(g.choice(["{0} * {1}", "{1} * {0}"]), activated(g, first), second)
    if g.chance(0.8):
        down = g.layer(f"Linear({inner}, {hidden}{bias})")
        out = g.line(f"self.{down}({{0}})", product, uses=[down])
        if g.chance(0.6):
            g.line("{0} + {1}", value, out)


def _two_layers(g: RealContext, value: Val) -> Val:
    hidden, inner = g.named(value.shape[-1]), g.constant(HIDDEN)
    first, last = (g.layer(f"Linear({a}, {b}{g.typed})") for a, b in ((hidden, inner), (inner, hidden)))
    middle = activated(g, g.line(f"self.{first}({{0}})", value, uses=[first]))
    return g.line(f"self.{last}({{0}})", middle, uses=[last])


@block(2.0, "tokens")
def feed_forward(g: RealContext) -> None:
    value = _rows(g)
    out = _two_layers(g, value)
    if g.chance(0.6):
        g.line(g.choice(["{0} + {1}", "{0} + 0.5 * {1}"]), value, out)


@block(3.0, "tokens")
def norm(g: RealContext) -> None:
    """A norm of the last dimension, with a residual before it, and scale and shift or a product behind it."""
    value = _rows(g)
    hidden = g.named(value.shape[-1])
    if g.chance(0.5):
        other = g.recent(lambda v: v.shape == value.shape and v.dtype is value.dtype and v is not value)
        value = g.line("{0} + {1}", value, other or value)
    form = g.choice(["layer", "layer", "layer_weights", "rms", "rms_hand", "rms_float", "plain", "l2", "hand"])
    if form in {"layer", "plain", "rms"}:
        code = {"layer": f"LayerNorm({hidden}{g.typed})", "rms": f"RMSNorm({hidden}, eps=1e-6{g.typed})",
                "plain": f"LayerNorm({hidden}, eps=1e-6, elementwise_affine=False)"}[form]  # fmt: skip
        name = g.layer(code)
        result = g.line(f"self.{name}({{0}})", value, uses=[name])
    elif form == "layer_weights":
        weight, bias = g.weight(hidden), g.weight(hidden)
        code = f"F.layer_norm({{0}}, ({hidden},), self.{weight}, self.{bias}, 1e-5)"
        result = g.line(code, value, uses=[weight, bias])
    elif form in {"rms_hand", "rms_float"}:
        wide = g.line("{0}.float()", value) if form == "rms_float" else value
        scaled = g.line("{0} * torch.rsqrt({0}.pow(2).mean(-1, keepdim=True) + 1e-6)", wide)
        weight = g.weight(hidden)
        factor = g.choice([f"self.{weight}", f"(1.0 + self.{weight})"])
        result = g.line(f"{factor} * {{0}}.to(self.{weight}.dtype)", scaled, uses=[weight])
    elif form == "hand":
        mean = g.line("{0}.mean(-1, keepdim=True)", value)
        code = g.choice(["{0}.var(-1, keepdim=True, unbiased=False)", "({0} - {1}).pow(2).mean(-1, True)"])
        spread = g.line(code, value, mean)
        result = g.line("({0} - {1}) / torch.sqrt({2} + 1e-5)", value, mean, spread)
    else:
        by_hand = "{0} / {0}.norm(dim=-1, keepdim=True).clamp(min=1e-6)"
        result = g.line(g.choice(["F.normalize({0}, dim=-1)", by_hand]), value)
    if value.dim == 3 and g.chance(0.3):
        condition = g.floats(["B", hidden], ["normal"])
        name = g.layer(f"Linear({hidden}, 2 * {hidden}{g.typed})")
        shift, scale = g.lines_of(f"self.{name}(F.silu({{0}})).unsqueeze(1).chunk(2, -1)", 2, condition, uses=[name])
        g.line("{0} * (1 + {2}) + {1}", result, shift, scale)


@block(1.5, "tokens")
def router(g: RealContext) -> None:
    """Experts chosen by topk of a softmax, combined by one_hot, scatter or index_add."""
    value = _rows(g)
    hidden, experts, k = g.named(value.shape[-1]), g.constant([4, 8, 16, 60, 64, 128]), g.choice([1, 2, 4])
    flat = g.line(f"{{0}}.reshape(-1, {hidden})", value, exact="move")
    gate = g.layer(f"Linear({hidden}, {experts}, bias=False{g.typed})")
    logits = g.line(f"self.{gate}({{0}})", flat, uses=[gate])
    codes = ["torch.softmax({0}, -1)", "torch.softmax({0}, -1, dtype=torch.float32)", "torch.sigmoid({0})"]
    scores = g.line(g.choice(codes), logits)
    weights, chosen = g.lines_of(f"torch.topk({{0}}, {k}, dim=-1)", 2, scores)
    if g.chance(0.6):
        # One weight divided by itself is 1, and its gradient nothing but rounding errors.
        weights = g.line("{0} / {0}.sum(-1, keepdim=True)" if k > 1 else "{0} * 2", weights)
    form = g.choice(["one_hot", "scatter", "index_add", "counts"])
    if form == "counts":
        counts = g.line(f"F.one_hot({{0}}, {experts}).sum((0, 1))", chosen)
        g.line("{0}.to({1}.dtype) * {1}.mean(0)", counts, scores)
        return
    if form == "index_add":
        positions = g.line(f"torch.arange({{0}}.numel()) // {k}", chosen, exact="arith")
        taken = g.line("{0}[{1}] * {2}.reshape(-1, 1).to({0}.dtype)", flat, positions, weights)
        g.line("torch.zeros_like({0}).index_add(0, {1}, {2})", flat, positions, taken)
        return
    if form == "one_hot":
        table = g.line(f"(F.one_hot({{0}}, {experts}).to({{1}}.dtype) * {{1}}.unsqueeze(-1)).sum(1)", chosen, weights)
    else:
        table = g.line("torch.zeros_like({2}).scatter(1, {0}, {1})", chosen, weights, scores)
    inner = g.constant([32, 64, 128])
    up = g.weight(f"{experts}, {hidden}, {inner}", f" * {hidden} ** -0.5")
    middle = g.line(f'torch.einsum("td,edf->etf", {{0}}, self.{up})', flat, uses=[up])
    g.line('torch.einsum("te,etf->tf", {0}.to({1}.dtype), {1})', table, activated(g, middle))


@block(1.5, "ids")
def embedded(g: RealContext) -> None:
    """Token, position and type embeddings of a large vocabulary, with a norm."""
    words, hidden = g.constant(VOCABULARIES), g.constant([s for s in HIDDEN if s <= 1024])
    value = ids(g, words)
    padding = ", padding_idx=0" if g.chance(0.3) else ""
    name = g.layer(f"Embedding({words}, {hidden}{padding}{g.typed})")
    result = g.line(f"self.{name}({{0}})", value, exact="move", uses=[name])
    if g.chance(0.3):
        g.line(f"{{0}} * {hidden} ** 0.5", result)
    elif g.chance(0.5):
        table = g.layer(f"Embedding(2048, {hidden}{g.typed})")
        at = g.line("torch.arange({0}.shape[1])", value, exact="arith")
        total = g.line(f"{{0}} + self.{table}({{1}})", result, at, uses=[table])
        layer = g.layer(f"LayerNorm({hidden}{g.typed})")
        g.line(f"self.{layer}({{0}})", total, uses=[layer])


@block(1.0, "ids")
def embedding_bag(g: RealContext) -> None:
    words, hidden, count = g.constant(VOCABULARIES), g.constant([16, 32, 64, 128]), g.constant([2, 5, 33, 100])
    value = g.input(["B", count], "int64", "index", 0, words)
    mode = g.choice(["sum", "mean", "max"])
    name = g.layer(f'EmbeddingBag({words}, {hidden}, mode="{mode}"{g.typed})')
    g.line(f"self.{name}({{0}})", value, uses=[name])


@block(2.0, "vectors")
def vocabulary(g: RealContext) -> None:
    """What follows logits of a large vocabulary."""
    if g.chance(0.5):
        last = g.line("{0}[:, -1]", tokens(g), exact="move")
        hidden, words = g.named(last.shape[-1]), g.constant(VOCABULARIES)
        name = g.layer(f"Linear({hidden}, {words}, bias=False{g.typed})")
        logits = g.line(f"self.{name}({{0}})", last, uses=[name])
    else:
        logits = g.floats(["B", g.constant(VOCABULARIES)], ["normal", "offset", "distinct", "spread", "ties"])
    if g.chance(0.3):
        codes = ["{0} / 0.7", "30.0 * torch.tanh({0} / 30.0)", "{0} - {0}.amax(-1, keepdim=True)"]
        logits = g.line(g.choice(codes), logits)
    form = g.choice(["log_softmax", "softmax", "argmax", "topk", "loss", "picked", "nucleus", "logsumexp", "entropy"])
    if form == "argmax":
        if not logits.exact:
            raise Skip
        g.line("{0}.argmax(-1)", logits, exact="arith")
    elif form == "topk":
        # Of equal values, any positions are right.
        best = g.line(f"torch.topk({{0}}, {g.choice([1, 5, 50])}, dim=-1)[0]", logits)
        g.line("torch.softmax({0}, -1)", best)
    elif form == "loss":
        target = g.input(["B"], "int64", "index", 0, g.named(logits.shape[-1]))
        g.line(f"F.cross_entropy({{0}}, {{1}}{g.choice(['', ', label_smoothing=0.1'])})", logits, target)
    elif form == "picked":
        target = g.input(["B", 1], "int64", "index", 0, g.named(logits.shape[-1]))
        g.line("torch.log_softmax({0}, -1).gather(-1, {1}).squeeze(-1)", logits, target)
    elif form == "nucleus":
        ordered = g.line("torch.sort({0}, descending=True)[0]", logits)
        total = g.line("torch.softmax({0}, -1).cumsum(-1)", ordered)
        g.line("torch.where({0} > 0.9, 0.0, {1})", total, ordered)
    elif form == "entropy":
        chance = g.line("torch.softmax({0}, -1)", logits)
        g.line("-({0} * {1}).sum(-1)", chance, g.line("torch.log_softmax({0}, -1)", logits))
    else:
        g.line({"log_softmax": "F.log_softmax({0}, dim=-1)", "softmax": "torch.softmax({0}, dim=-1)",
                "logsumexp": "torch.logsumexp({0}, -1)"}[form], logits)  # fmt: skip


@block(1.5, "tokens")
def pooled_tokens(g: RealContext) -> None:
    """One vector for each sequence: over unmasked tokens, the last or first token, or a weighted sum."""
    value = tokens(g)
    form = g.choice(["mean", "masked", "masked", "max", "first", "last", "weighted", "statistics"])
    if form in {"masked", "max", "last", "weighted"}:
        shape = [g.batch_or_length(size) for size in value.shape[:2]]
        mask = g.input(shape, "bool", "padding_bool", 1)
        if form == "masked":
            g.line("({0} * {1}.unsqueeze(-1)).sum(1) / {1}.sum(1, keepdim=True).clamp(min=1e-9)", value, mask)
        elif form == "max":
            g.line('{0}.masked_fill(~{1}.unsqueeze(-1), float("-inf")).amax(1)', value, mask)
        elif form == "last":
            g.line("{0}[torch.arange({0}.shape[0]), {1}.long().sum(-1) - 1]", value, mask, exact="move")
        else:
            scores = g.line("{0}.mean(-1).masked_fill(~{1}, torch.finfo({0}.dtype).min)", value, mask)
            g.line("(torch.softmax({1}, 1).unsqueeze(-1) * {0}).sum(1)", value, scores)
    elif form == "statistics":
        g.line("torch.cat([{0}.mean(1), {0}.std(1, unbiased=False)], -1)", value)
    else:
        g.line({"mean": "{0}.mean(1)", "first": "{0}[:, 0]"}[form], value, exact="move" if form == "first" else "no")


@block(1.0, "tokens")
def one_token(g: RealContext) -> None:
    """The end of an encoder's last layer, of which a classifier takes one token."""
    value = _rows(g)
    out = g.line("{0} + {1}", value, _two_layers(g, value))
    norm = g.layer(f"LayerNorm({g.named(value.shape[-1])}{g.typed})")
    out = g.line(f"self.{norm}({{0}})", out, uses=[norm])
    g.line(g.choice(["{0}[:, 0]", "{0}[:, 0]", "{0}[:, -1]", "{0}[:, :1]", "{0}.transpose(0, 1)[0]"]), out)


@block(1.0, "tokens")
def moved_tokens(g: RealContext) -> None:
    value = tokens(g)
    forms = ["torch.roll({0}, 1, 1)", "{0}.flip(1)", "F.pad({0}, (0, 0, 1, 0))[:, :-1]", "{0}.transpose(1, 2)",
             "torch.cat([{0}[:, -1:], {0}[:, :-1]], 1)", "{0}.repeat_interleave(2, 1)", "{0}[:, ::2]",
             "torch.cat([{0}, {0}.mean(1, keepdim=True)], 1)", "{0} - {0}.mean(1, keepdim=True)"]  # fmt: skip
    code = g.choice(forms)
    g.line(code, value, exact="no" if "mean" in code else "move")


@block(0.7, "tokens")
def recurrent(g: RealContext) -> None:
    value = tokens(g)
    if value.shape[1] > 33 or value.dtype.itemsize != 4:
        raise Skip
    both = ", bidirectional=True" if g.chance(0.3) else ""
    size = g.constant([32, 64, 100, 128, 256])
    name = g.layer(f"{g.choice(['LSTM', 'GRU'])}({g.named(value.shape[-1])}, {size}, batch_first=True{both})")
    g.line(f"self.{name}({{0}})[0]", value, uses=[name])


@block(0.8, "vectors")
def similar(g: RealContext) -> None:
    """Contrastive logits: normalized vectors against many others."""
    value = vectors(g)
    count = g.constant([1000, 1024, 5000])
    other = g.weight(f"{count}, {g.named(value.shape[-1])}")
    form = g.choice(["cosine", "cosine", "distance"])
    if form == "cosine":
        first = g.line("F.normalize({0}, dim=-1)", value)
        logits = g.line(f"{{0}} @ F.normalize(self.{other}, dim=-1).t() * 14.3", first, uses=[other])
        g.line("torch.softmax({0}, -1)", logits)
    else:
        code = f"({{0}}.pow(2).sum(1, keepdim=True) - 2 * {{0}} @ self.{other}.t() + self.{other}.pow(2).sum(1))"
        g.line(code, value, uses=[other])
