"""Views, copies, slicing and concatenation."""

from __future__ import annotations

from fuzzing.context import Context
from fuzzing.draft import Draft, Val
from fuzzing.registry import add, at_least, dims, floating, like, op

_ON_MATRICES = ["{0}.t()", "{0}.T.contiguous()", "torch.rot90({0})"]
_ANY = [
    "{0}.reshape(-1)", "{0}.flatten()", "torch.ravel({0})", "{0}.unsqueeze(0)", "{0}.unsqueeze(-1)", "{0}.squeeze()",
    "torch.atleast_2d({0})", "{0}.view(-1)", "{0}[None]", "{0}[...]", "{0}.view_as({0})", "{0}.expand_as({0})",
]  # fmt: skip
_AT_LEAST_1 = [
    "{0}[..., -1]", "{0}[0]", "{0}[-1]", "{0}[..., :-1]", "{0}[..., 1:]", "{0}[::2]", "{0}[..., ::2]", "{0}[1:]",
    "{0}.flip(-1)", "{0}.roll(1, -1)", "{0}.roll(-2, 0)", "{0}.repeat(2, *[1] * ({0}.dim() - 1))", "{0}[..., None]",
    "{0}.narrow(0, 0, 1)", "{0}.select(-1, 0)", "torch.flip({0}, [0])", "{0}.repeat_interleave(2, dim=0)",
    "{0}.unfold(-1, 2, 1)", "torch.diff({0})", "{0}[-2:]", "torch.diag_embed({0})", "{0}[:, ...]", "{0}[0:0 + 1]",
]  # fmt: skip
_AT_LEAST_2 = [
    "{0}.transpose(0, 1)", "{0}.transpose(-1, -2)", "{0}.mT", "{0}.flatten(0, 1)", "{0}.flatten(-2)", "{0}[:, 0]",
    "{0}[:, -1]", "{0}[:, 1:]", "{0}.movedim(0, -1)", "{0}.swapaxes(0, -1)", "torch.tril({0})", "torch.triu({0}, 1)",
    "{0}.diagonal()", "{0}.reshape({0}.shape[0], -1)", "{0}.view({0}.shape[0], -1)",
    "{0}[:, None]", "{0}.transpose(0, 1).contiguous()", "{0}.diagonal(dim1=-2, dim2=-1)", "{0}[..., -1, :]",
    "{0}[:, ::2]", "{0}.transpose(0, 1).reshape(-1)", "{0}.flip(0, 1)", "{0}.size(0) * {0}", "{0} / {0}.shape[-1]",
]  # fmt: skip
_ARITHMETIC = ("torch.diff({0})", "{0}.size(0) * {0}", "{0} / {0}.shape[-1]")


def _moving(code: str, condition: object, weight: float = 0.35) -> None:
    def build(g: Context) -> Draft:
        kind = "arith" if code in _ARITHMETIC else "move"
        return Draft(code, [g.take(condition)], kind)  # type: ignore[arg-type]

    add("view:" + code.replace("{0}", "x").replace(" ", ""), build, weight)


for _code in _ANY:
    _moving(_code, lambda v: True)
for _code in ("{0}.reshape(())", "{0}.view([])"):
    _moving(_code, lambda v: v.tensor.numel() == 1)
for _code in _AT_LEAST_1:
    _moving(_code, at_least(1))
for _code in _AT_LEAST_2:
    _moving(_code, at_least(2))
for _code in _ON_MATRICES:
    _moving(_code, dims(2))


@op(1.0)
def permute(g: Context) -> Draft:
    value = g.take(at_least(2))
    order = g.rng.sample(range(value.dim), value.dim)
    return Draft(f"{{0}}.permute{tuple(order)}", [value], "move")


@op(1.0)
def squeeze_dim(g: Context) -> Draft:
    value = g.take(at_least(1))
    return Draft(f"{{0}}.squeeze({g.dim_of(value)})", [value], "move")


@op(1.0)
def expand(g: Context) -> Draft:
    value = g.take(lambda v: v.dim < 4)
    if g.chance(0.5):
        return Draft(f"{{0}}.expand({g.integer(2, 3)}, *[-1] * {{0}}.dim())", [value], "move")
    other = g.take(lambda v: v.dim >= value.dim)
    return Draft(g.choice(["{0}.expand_as({1})", "{0}.expand({1}.shape)", "torch.broadcast_to({0}, {1}.shape)"]),
                 [value, other], "move")  # fmt: skip


@op(1.5)
def split(g: Context) -> Draft:
    value = g.take(at_least(1), lambda v: max(v.shape) >= 2)
    dim = g.choice([d for d, size in enumerate(value.shape) if size >= 2])
    size = value.shape[dim]
    if g.chance(0.5):
        return Draft(f"{{0}}.chunk(2, {dim})", [value], "move", out=2)
    if g.chance(0.5):
        return Draft(f"{{0}}.split([1, {{0}}.shape[{dim}] - 1], {dim})", [value], "move", out=2)
    step = g.integer(1, size)
    return Draft(f"torch.split({{0}}, {step}, dim={dim})", [value], "move", out=-(-size // step))


@op(0.8)
def unbind(g: Context) -> Draft:
    value = g.take(at_least(1), lambda v: 2 <= v.shape[-1] <= 4)
    return Draft("{0}.unbind(-1)", [value], "move", out=value.shape[-1])


@op(1.5)
def cat(g: Context) -> Draft:
    first = g.take(at_least(1))
    dim = g.dim_of(first)
    rest = [size for i, size in enumerate(first.shape) if i != dim % first.dim]

    def fits(v: Val) -> bool:
        return v.dim == first.dim and [s for i, s in enumerate(v.shape) if i != dim % first.dim] == rest

    second = g.take(fits) if g.chance(0.3) else g.take(fits, lambda v: v.dtype == first.dtype)
    if g.chance(0.2):
        return Draft(f"torch.cat([{{0}}, {{1}}, {{0}}], dim={dim})", [first, second], "arith")
    return Draft(f"torch.cat([{{0}}, {{1}}], dim={dim})", [first, second], "arith")


@op(0.8)
def stack(g: Context) -> Draft:
    first = g.take(lambda v: v.dim < 4)
    second = g.take(lambda v: v.shape == first.shape and v.dtype == first.dtype)
    return Draft(f"torch.stack([{{0}}, {{1}}], dim={g.choice([0, -1])})", [first, second], "move")


@op(0.8)
def pad(g: Context) -> Draft:
    value = g.take(floating, at_least(2))
    mode = g.choice(["constant", "constant", "reflect", "replicate", "circular"])
    amounts = g.choice(["(1, 0)", "(0, 2)", "(1, 1)"] + (["(1, 1, 0, 1)", "(-1, 0)"] if mode == "constant" else []))
    extra = ", value=0.5" if mode == "constant" and g.chance(0.5) else ""
    return Draft(f'F.pad({{0}}, {amounts}, mode="{mode}"{extra})', [value], "move")


@op(0.5)
def tile(g: Context) -> Draft:
    return Draft("{0}.tile(2)", [g.take(at_least(1))], "move")


@op(0.5)
def meshgrid(g: Context) -> Draft:
    first = g.take(dims(1))
    second = g.take(dims(1), lambda v: v.dtype == first.dtype)
    return Draft('torch.meshgrid({0}, {1}, indexing="ij")', [first, second], "move", out=2)


@op(0.5)
def broadcast_tensors(g: Context) -> Draft:
    first = g.take(lambda v: True)
    return Draft("torch.broadcast_tensors({0}, {1})", [first, g.take(like(first))], "move", out=2)


@op(0.4)
def as_strided(g: Context) -> Draft:
    value = g.take(at_least(1), lambda v: v.tensor.numel() >= 4 and v.tensor.is_contiguous())
    return Draft("{0}.as_strided((2, 2), (1, 2))", [value], "move")


@op(0.6)
def split_heads(g: Context) -> Draft:
    value = g.take(at_least(2), lambda v: v.shape[-1] % 2 == 0 and v.shape[-1] > 0)
    return Draft("{0}.unflatten(-1, (2, -1)).transpose(-2, -3)", [value], "move")


@op(0.5)
def sequence(g: Context) -> Draft:
    """Tensors created in the model."""
    value = g.take(at_least(1))
    code = g.choice(["torch.arange({0}.shape[-1])", "torch.arange(1, 4, dtype=torch.float32)", "torch.eye(3)",
                     "torch.linspace(0, 1, 5)", "torch.zeros({0}.shape[0], 2)", "torch.tensor([1, 2, 3])",
                     "torch.arange({0}.size(0)).unsqueeze(1) >= torch.arange({0}.size(0))", "torch.ones(2, 3)",
                     "torch.tensor([1.5, -2.0])", "torch.full(({0}.shape[0],), 7)"])  # fmt: skip
    if "linspace" in code:
        return Draft(code, [value], "no")
    return Draft(code, [value], "move")


@op(0.4)
def of_size(g: Context) -> Draft:
    value = g.take(floating, at_least(1))
    return Draft(g.choice(["{0} * {0}.shape[0]", "{0} + {0}.numel()", "{0} - float({0}.shape[-1])"]), [value], "arith")


@op(0.2)
def to_layout(g: Context) -> Draft:
    value = g.take(dims(4))
    return Draft("{0}.contiguous(memory_format=torch.channels_last)", [value], "move")
