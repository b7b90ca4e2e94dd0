"""Reductions, scans and sorts of 10^3 to 10^6 elements, and integers of all types near their limits."""

from __future__ import annotations

from fuzzing.draft import Skip, Val
from fuzzing.real_context import RealContext
from fuzzing.real_inputs import COUNTS, HIDDEN, INTEGERS, tokens
from fuzzing.registry import block


def _long(g: RealContext, kinds: tuple[str, ...] = ()) -> tuple[Val, str]:
    """A value of many elements, and the dimension to reduce, as text."""
    kinds = kinds or ("normal", "offset", "far", "positive", "spread", "small", "outliers")
    count = g.constant(COUNTS)
    form = g.choice(["flat", "rows", "columns", "image", "all"])
    total = g.number(count)
    rows = g.constant([r for r in (2, 3, 16, 33, 100, 1000) if r * total <= 2_000_000] or [1])
    if form in {"flat", "all"}:
        return g.floats([count], kinds), "0" if form == "flat" else ""
    if form == "rows":
        return g.floats([rows, count], kinds), "-1"
    if form == "columns":
        return g.floats([count, rows], kinds), "0"
    side = g.constant([31, 64, 100, 224, 256, 512])
    return g.floats(["B", g.constant([1, 3, 4, 16]), side, side], kinds), g.choice(["(2, 3)", "(0, 2, 3)", "(1, 2, 3)"])


@block(3.5, "long")
def reduction(g: RealContext) -> None:
    value, dim = _long(g)
    name = g.choice(["sum", "mean", "var", "std", "norm", "logsumexp", "amax", "squares", "l1", "softmax",
                     "log_softmax", "centered", "rms"])  # fmt: skip
    many = "(" in dim
    if name in {"softmax", "log_softmax"}:
        if many or not dim:
            raise Skip
        g.line(f"F.{name}({{0}}, dim={dim})", value)
        return
    keep = f"{dim}, keepdim=True" if dim else ""
    if name == "centered":
        mean = g.line(f"{{0}}.mean({keep})", value)
        g.line("{0} - {1}", value, mean)
        return
    if name == "rms":
        mean = g.line(f"{{0}}.pow(2).mean({keep})", value)
        g.line("{0} * torch.rsqrt({1} + 1e-6)", value, mean)
        return
    codes = {
        "sum": f"{{0}}.sum({dim})", "mean": f"{{0}}.mean({dim})", "var": f"{{0}}.var({dim})",
        "std": f"{{0}}.std({dim})",
        "norm": f"torch.linalg.vector_norm({{0}}{', dim=' + dim if dim else ''})", "amax": f"{{0}}.amax({dim})",
        "logsumexp": f"torch.logsumexp({{0}}, {dim or '0'})", "squares": f"({{0}} * {{0}}).sum({dim})",
        "l1": f"{{0}}.abs().mean({dim})",
    }  # fmt: skip
    result = g.line(codes[name], value)
    if g.chance(0.3):
        g.line(g.choice(["{0} / 3", "{0} + 1", "{0}.sqrt().nan_to_num()"]), result)


@block(1.5, "long")
def long_norm(g: RealContext) -> None:
    """Norms whose statistics are over many elements."""
    groups, side = g.constant([1, 2, 4, 32]), g.constant([31, 64, 100, 128, 224, 256])
    channels = g.product(f"{groups} * {g.choice([1, 1, 2, 4])}")
    value = g.floats(["B", channels, side, side], ["offset", "normal", "far", "outliers"])
    form = g.choice(["group", "group", "instance", "layer", "layer"])
    if form == "layer":
        g.line("F.layer_norm({0}, {0}.shape[1:])", value)
    elif form == "instance":
        g.line("F.instance_norm({0})", value)
    else:
        weight, bias = g.weight(channels), g.weight(channels)
        result = g.line(f"F.group_norm({{0}}, {groups}, self.{weight}, self.{bias})", value, uses=[weight, bias])
        if g.chance(0.5):
            g.line("F.silu({0})", result)


@block(2.5, "long")
def scan(g: RealContext) -> None:
    name = g.choice(["cumsum", "cumsum", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "masked"])
    kinds = {"cummax": ("distinct", "ties"), "cummin": ("distinct", "ties"), "masked": ("normal",)}
    value, dim = _long(g, kinds.get(name, ("normal", "positive", "offset", "small")))
    dim = "-1" if "(" in dim or not dim else dim
    if name == "cumprod":
        g.line(f"torch.cumprod(1 + {{0}}.clamp(-1, 1) * 1e-4, {dim})", value)
    elif name in {"cummax", "cummin"}:
        g.line(f"torch.{name}({{0}}, {dim})[0]", value, exact="move")
    elif name == "masked":
        # The decay of a state space model.
        total = g.line(f"torch.cumsum(F.logsigmoid({{0}}), {dim})", value)
        g.line("torch.exp({0})", total)
    else:
        result = g.line(f"torch.{name}({{0}}, {dim})", value)
        if g.chance(0.3):
            g.line(f"{{0}} / {{0}}.shape[{dim}]", result)


@block(1.5, "long")
def order(g: RealContext) -> None:
    """Sorting and searching, in values of which no two are equal, or by values alone."""
    value, dim = _long(g, ("distinct", "ties", "normal"))
    dim = "-1" if "(" in dim or not dim else dim
    k = g.choice([1, 5, 100])
    code = g.choice([
        f"torch.topk({{0}}, {k}, dim={dim})[0]", f"torch.topk({{0}}, {k}, dim={dim}, largest=False)[0]",
        f"torch.sort({{0}}, dim={dim})[0]", f"torch.sort({{0}}, dim={dim}, descending=True, stable=True)[1]",
        f"{{0}}.argmax({dim})", f"{{0}}.argmin({dim})", f"torch.max({{0}}, {dim})[0]", f"{{0}}.amin({dim})",
        f"torch.median({{0}}, {dim})[0]", "{0}.argmax()",
        "torch.searchsorted({0}.flatten().sort()[0], {0}.flatten()[:100])",
    ])  # fmt: skip
    if value.dtype.itemsize != 4 and ("arg" in code or "[1]" in code):
        raise Skip
    if "arg" in code and not value.exact:
        raise Skip
    g.line(code, value, exact="arith")


@block(2.5, "long")
def integers(g: RealContext) -> None:
    """Integers of each type near their limits: arithmetic, comparisons, reductions and casts."""
    kind = g.choice(INTEGERS)
    shape = g.choice([["B", "S"], ["B", "S", 4], [g.constant(COUNTS[:8])], ["B", g.constant([3, 33]), "W", "W"]])
    value = g.input(shape, kind, "bool" if kind == "bool" else "limits")
    codes = [
        "{0}.any()",
        "{0}.all(-1)",
        "{0}.any(-1)",
        "{0} == {1}",
        "{0}.float().mean(-1)",
        "{0}.long().cumsum(-1)",
        "{0}.sum()",
        "{0}.sum(-1)",
        "torch.where({0} > 0, {0}, {1})",
        "{0}.bool()",
        "~{0}",
        "{0} & {1}",
        "{0} ^ {1}",
        "{0}.amax(-1)",
        "{0}.flip(-1)",
        "{0}.cumsum(-1)",
        "{0}.logical_not()",
        "{0}.roll(1, -1)",
        "{0}.masked_fill({0} == {1}, 1)",
        "torch.count_nonzero({0}, dim=-1)",
        "{0}.to(torch.float32) / 255",
    ]
    if kind != "bool":
        codes += ["{0} + {1}", "{0} - {1}", "{0} * 2", "{0}.abs()", "-{0}", "{0} % 7", "{0} // 3", "{0} < {1}",
                  "torch.maximum({0}, {1})", "{0}.clamp(3, 100)", "{0} >> 1", "{0} << 1", "{0}.amin(-1)",
                  "torch.sign({0})", "torch.minimum({0}, {1})", "{0} / 3", "torch.sort({0}, -1)[0]", "{0} * {1}",
                  "{0}.int()",
                  "{0}.to(torch.int8)", "{0}.to(torch.uint8)", "{0}.to(torch.int16)", "({0}.long() - 1).clamp(min=0)",
                  "torch.bitwise_left_shift({0}, 2)", "{0} >= 1", "{0}.prod(-1)", "{0}.bitwise_not()",
                  'torch.div({0}, 3, rounding_mode="trunc")', "torch.topk({0}, 1)[0]", "{0}.square()"]  # fmt: skip
    for _ in range(g.choice([1, 2, 3])):
        code = g.choice(codes)
        other = g.input(shape, kind, "bool" if kind == "bool" else "limits") if "{1}" in code else value
        if value.dtype is not other.dtype or value.shape != other.shape:
            return
        value = g.line(code, value, *([other] if "{1}" in code else []), exact="arith")
        if value.is_float or not value.dim:
            return


@block(1.0, "long")
def counted(g: RealContext) -> None:
    """Positions, histograms and lookups by integers."""
    words = g.constant([10, 256, 1000, 30_522])
    value = g.input(["B", "S"], g.choice(["int64", "int64", "int32"]), "index", 0, words)
    codes = ["{0}.ne(0).long().cumsum(-1) - 1", "({0} == {0}[:, :1]).sum(-1)", "torch.sort({0}, -1)[0]",
             "{0}.eq({0}.amax(-1, keepdim=True)).int().argmax(-1)", "torch.bucketize({0}, torch.arange(0, 1000, 10))",
             "{0}.flip(-1).cumsum(-1).flip(-1)"]  # fmt: skip
    if value.dtype.itemsize == 8:
        table = f"torch.arange({words}).flip(0).expand({{0}}.shape[0], -1)"
        codes += [f"torch.zeros({{0}}.shape[0], {words}).scatter_add(1, {{0}}, torch.ones({{0}}.shape))",
                  f"F.one_hot({{0}}, {words}).sum(1)", f"torch.gather({table}, 1, {{0}})"]  # fmt: skip
    g.line(g.choice(codes), value, exact="arith")


@block(1.0, "tokens")
def products(g: RealContext) -> None:
    """Products of matrices with long inner dimensions, and outer products."""
    value = tokens(g)
    width = g.named(value.shape[-1])
    form = g.choice(["gram", "gram", "bilinear", "low_rank", "batch"])
    if form == "gram":
        g.line(g.choice(["{0} @ {0}.mT", "{0}.mT @ {0}", 'torch.einsum("bld,bmd->blm", {0}, {0})']), value)
    elif form == "bilinear":
        weight = g.weight(f"{width}, {width}", f" * {width} ** -0.5")
        g.line(f"(({{0}} @ self.{weight}) * {{0}}).sum(-1)", value, uses=[weight])
    elif form == "low_rank":
        rank = g.constant([4, 8, 16, 64])
        pairs = ((width, rank), (rank, width))
        down, up = (g.layer(f"Linear({a}, {b}, bias=False{g.typed})") for a, b in pairs)
        g.line(f"{{0}} + self.{up}(self.{down}({{0}})) * 2.0", value, uses=[down, up])
    else:
        other = g.floats(["B", width, g.constant([h for h in HIDDEN if h <= 512])], ["normal"])
        g.line("torch.bmm({0}, {1})", value, other)


@block(0.7, "tokens")
def gathered(g: RealContext) -> None:
    """Many rows added to few, as graph networks and histograms do."""
    value = tokens(g)
    batch, length, _ = value.shape
    nodes = g.constant([2, 8, 64])
    index = g.input(["B", length], "int64", "index", 0, nodes)
    start = f"torch.zeros({{0}}.shape[0], {nodes}, {{0}}.shape[2], dtype={{0}}.dtype)"
    if batch == 1 and g.chance(0.5):
        code = g.choice(["index_add(0, {1}[0], {0}[0])", "index_put(({1}[0],), {0}[0], accumulate=True)"])
        g.line(f"{start}[0].{code}", value, index)
        return
    reduce = g.choice(["sum", "mean", "amax"])
    g.line(f'{start}.scatter_reduce(1, {{1}}.unsqueeze(-1).expand({{0}}.shape), {{0}}, "{reduce}")', value, index)
