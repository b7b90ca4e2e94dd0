"""Reductions, scans, sorting."""

from __future__ import annotations

from fuzzing.context import Context
from fuzzing.draft import Draft, Val
from fuzzing.registry import at_least, boolean, exact, floating, integral, numeric, op


def _where(g: Context, value: Val, many: bool = True) -> str:
    dim = g.dim_of(value)
    if many and value.dim > 1 and g.chance(0.2):
        other = (dim + 1) % value.dim
        return f"({dim % value.dim}, {other})"
    return str(dim)


def _keep(g: Context) -> str:
    return ", keepdim=True" if g.chance(0.4) else ""


def _typed(g: Context, value: Val) -> str:
    """An explicit dtype argument, in some of the cases."""
    if not g.chance(0.25):
        return ""
    return ", dtype=torch." + ("float32" if value.is_float else g.choice(["float32", "int32", "int64"]))


@op(2.0)
def total(g: Context) -> Draft:
    value = g.take(at_least(1))
    name = g.choice(["sum", "sum", "mean", "prod"])
    if name == "mean" and not value.is_float:
        name = "sum"
    kind = "arith" if name == "sum" else "no"
    if g.chance(0.2):
        return Draft(f"{{0}}.{name}()", [value], kind)
    where = _where(g, value, name != "prod")
    return Draft(f"{{0}}.{name}({where}{_keep(g)}{_typed(g, value)})", [value], kind)


@op(1.5)
def extreme(g: Context) -> Draft:
    value = g.take(at_least(1), numeric)
    return Draft(f"{{0}}.{g.choice(['amax', 'amin'])}({_where(g, value)}{_keep(g)})", [value], "move")


@op(0.5)
def extreme_of_all(g: Context) -> Draft:
    return Draft(g.choice(["{0}.max()", "{0}.min()"]), [g.take(numeric)], "move")


@op(0.5)
def aminmax(g: Context) -> Draft:
    value = g.take(at_least(1), numeric)
    return Draft(f"torch.aminmax({{0}}, dim={g.dim_of(value)})", [value], "move", out=2)


@op(1.0)
def max_with_index(g: Context) -> Draft:
    value = g.take(at_least(1), numeric, exact, distinct)
    name = g.choice(["max", "min", "median", "cummax", "cummin"])
    keep = "" if name.startswith("cum") else _keep(g)
    return Draft(f"torch.{name}({{0}}, {g.dim_of(value)}{keep})", [value], "arith", out=2)


@op(1.5)
def arg_extreme(g: Context) -> Draft:
    value = g.take(at_least(1), numeric, exact, distinct)
    return Draft(
        f"{{0}}.{g.choice(['argmax', 'argmin'])}({g.choice([g.dim_of(value), -1])}{_keep(g)})", [value], "arith"
    )


@op(0.3)
def arg_extreme_of_all(g: Context) -> Draft:
    return Draft("torch.argmax({0})", [g.take(numeric, exact, distinct)], "arith")


@op(1.5)
def sort(g: Context) -> Draft:
    value = g.take(at_least(1), numeric, exact, distinct)
    down = f", descending={g.chance(0.5)}"
    dim = g.dim_of(value)
    stable = g.chance(0.5)
    if g.chance(0.3):
        return Draft(f"torch.argsort({{0}}, dim={dim}{down}, stable=True)", [value], "arith")
    if not stable:
        return Draft(f"torch.sort({{0}}, dim={dim}{down})[0]", [value], "arith")
    return Draft(f"torch.sort({{0}}, dim={dim}{down}, stable=True)", [value], "arith", out=2)


@op(1.2)
def topk(g: Context) -> Draft:
    value = g.take(at_least(1), numeric, exact, distinct, lambda v: v.shape[-1] >= 1)
    k = g.integer(1, min(3, value.shape[-1]))
    return _looked_up(g, value, f"torch.topk({{0}}.detach(), {k}, largest={g.chance(0.6)})")


def _looked_up(g: Context, value: Val, code: str) -> Draft:
    """The values, or a lookup with the indices: never the indices, since torch does not define the order of ties.

    Needs detached values, since that order would also decide where a gradient goes.
    """
    return Draft(g.choice([f"{code}[0]", f"{{0}}.detach().gather(-1, {code}[1])"]), [value], "arith")


@op(0.4)
def kthvalue(g: Context) -> Draft:
    value = g.take(at_least(1), numeric, exact, distinct)
    return _looked_up(g, value, f"torch.kthvalue({{0}}.detach(), {g.integer(1, value.shape[-1])}, -1, True)")


@op(0.4)
def median(g: Context) -> Draft:
    value = g.take(at_least(1), numeric, exact, distinct)
    return Draft(g.choice(["torch.median({0})", f"torch.median({{0}}, {g.dim_of(value)})[0]"]), [value], "arith")


@op(1.0)
def cumsum(g: Context) -> Draft:
    value = g.take(at_least(1))
    return Draft(f"torch.cumsum({{0}}, {g.dim_of(value)}{_typed(g, value)})", [value], "arith")


@op(0.4)
def cumprod(g: Context) -> Draft:
    value = g.take(at_least(1), floating)
    return Draft(f"torch.cumprod({{0}}.clamp(-1.5, 1.5), {g.dim_of(value)})", [value])


@op(1.0)
def spread(g: Context) -> Draft:
    value = g.take(at_least(1), floating, lambda v: v.shape[-1] >= 2)
    name = g.choice(["var", "std"])
    correction = g.choice(["", ", correction=0", ", correction=1", ", unbiased=False"])
    after = "" if name == "var" else " + 0"
    return Draft(f"torch.{name}({{0}}, dim=-1{correction}{_keep(g)}){after}", [value])


@op(0.3)
def var_mean(g: Context) -> Draft:
    return Draft("torch.var_mean({0}, dim=-1, correction=0)", [g.take(at_least(1), floating)], out=2)


@op(2.0)
def softmax(g: Context) -> Draft:
    value = g.take(at_least(1), floating)
    name = g.choice(["torch.softmax", "F.log_softmax", "torch.softmax", "F.softmin"])
    return Draft(f"{name}({{0}}, dim={g.dim_of(value)})", [value])


@op(0.4)
def softmax_typed(g: Context) -> Draft:
    value = g.take(at_least(1), floating)
    return Draft("torch.softmax({0}, dim=-1, dtype=torch.float32).to({0}.dtype)", [value])


@op(0.7)
def logsumexp(g: Context) -> Draft:
    value = g.take(at_least(1), floating)
    return Draft(f"torch.logsumexp({{0}}, {_where(g, value)}{_keep(g)})", [value])


@op(0.3)
def logcumsumexp(g: Context) -> Draft:
    value = g.take(at_least(1), floating)
    return Draft(f"torch.logcumsumexp({{0}}, {g.dim_of(value)})", [value])


@op(0.8)
def norm(g: Context) -> Draft:
    value = g.take(at_least(1), floating)
    which = g.choice(["2", "1", 'float("inf")', "3"])
    return Draft(f"torch.linalg.vector_norm({{0}} + 0.1, {which}, dim={g.dim_of(value)}{_keep(g)})", [value])


@op(0.6)
def normalize(g: Context) -> Draft:
    value = g.take(at_least(2), floating)
    return Draft(f"F.normalize({{0}}, dim={g.dim_of(value)})", [value])


@op(1.0)
def any_all(g: Context) -> Draft:
    value = g.take(boolean)
    name = g.choice(["any", "all"])
    if not value.dim or g.chance(0.3):
        return Draft(f"{{0}}.{name}()", [value], "arith")
    return Draft(f"{{0}}.{name}({g.dim_of(value)}{_keep(g)})", [value], "arith")


@op(0.5)
def count_nonzero(g: Context) -> Draft:
    return Draft("torch.count_nonzero({0}, dim=0)", [g.take(at_least(1), exact)], "arith")


@op(0.5)
def mask_positions(g: Context) -> Draft:
    """Positions counted over unmasked tokens, as with padding."""
    return Draft("({0}.long().cumsum(-1) - 1).clamp(min=0)", [g.take(boolean, at_least(1))], "arith")


@op(0.4)
def bucketize(g: Context) -> Draft:
    return Draft("torch.bucketize({0}, torch.tensor([-1.0, 0.0, 0.5]))", [g.take(floating, exact)], "arith")


@op(0.3)
def bincount_like(g: Context) -> Draft:
    return Draft("F.one_hot({0} % 5, 5)", [g.take(integral, lambda v: v.dtype.itemsize == 8)], "arith")


@op(0.2)
def trace(g: Context) -> Draft:
    return Draft("torch.trace({0})", [g.take(floating, lambda v: v.dim == 2)], "arith")


def distinct(value: Val) -> bool:
    """Whether no two elements are equal, so that their order is defined."""
    flat = value.tensor.detach().reshape(-1)
    return flat.numel() > 0 and len(flat.unique()) == flat.numel()
