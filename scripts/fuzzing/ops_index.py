"""Indexing, gathering, scattering."""

from __future__ import annotations

import torch

from fuzzing.context import Context
from fuzzing.draft import Draft, Skip, Val
from fuzzing.registry import at_least, boolean, dims, floating, integral, numeric, op, size_name


def _index(g: Context, size: int, shape: tuple[int, ...], negative: bool | None = None) -> Val:
    """Integers that index a dimension: an input or a computed value."""
    if size < 1:
        raise Skip
    negative = g.chance(0.5) if negative is None else negative
    name = size_name(g, size)
    if g.chance(0.35):
        usable = [v for v in g.values if v.dtype is torch.int64 and v.shape == shape and v.tensor.numel()]
        low = -size if negative else 0
        usable = [v for v in usable if low <= int(v.tensor.min()) and int(v.tensor.max()) < size and v.name[0] == "v"]
        if usable:
            return g.choice(usable)
    low: int | str = 0
    if negative:
        low = f"-{name}" if isinstance(name, str) else -name
    kind = "int64" if g.chance(0.85) else "int32"
    return g.input([size_name(g, s) for s in shape], kind, "index", low, name)


@op(1.5)
def index_first(g: Context) -> Draft:
    value = g.take(at_least(1))
    return Draft("{0}[{1}]", [value, _index(g, value.shape[0], (g.integer(1, 3),))], "move")


@op(1.0)
def index_second(g: Context) -> Draft:
    value = g.take(at_least(2))
    return Draft("{0}[:, {1}]", [value, _index(g, value.shape[1], (2,))], "move")


@op(2.0)
def index_pair(g: Context) -> Draft:
    value = g.take(at_least(2))
    count = g.integer(1, 3)
    first, second = _index(g, value.shape[0], (count,)), _index(g, value.shape[1], (count,))
    return Draft("{0}[{1}, {2}]", [value, first, second], "move")


@op(0.7)
def index_outer(g: Context) -> Draft:
    value = g.take(at_least(3))
    shape = (2,)
    return Draft(
        "{0}[{1}, :, {2}]", [value, _index(g, value.shape[0], shape), _index(g, value.shape[2], shape)], "move"
    )


@op(1.5)
def last_token(g: Context) -> Draft:
    """The last token of each sequence; an empty sequence gives index -1."""
    value = g.take(at_least(2), lambda v: v.shape[0] > 0 and v.shape[1] > 0)
    name = size_name(g, value.shape[1])
    lengths = g.input([size_name(g, value.shape[0])], "int64", "index", 0, name)
    return Draft("{0}[torch.arange({0}.shape[0]), {1} - 1]", [value, lengths], "move")


@op(1.0)
def index_constant(g: Context) -> Draft:
    value = g.take(at_least(2), lambda v: min(v.shape[:2]) >= 2)
    code = g.choice(["{0}[[0, -1]]", "{0}[:, [1, -2]]", "{0}[[0, 1], [-1, 0]]", "{0}[torch.tensor([1, -1])]",
                     "{0}[..., torch.tensor([0])]", "{0}[-1, ..., -1]", "{0}[torch.tensor(1)]",
                     "{0}[torch.tensor([[0, 1], [1, 0]])]", "{0}[None, :, torch.tensor([0, -1])]"])  # fmt: skip
    return Draft(code, [value], "move")


@op(0.8)
def index_computed(g: Context) -> Draft:
    """An index that the graph computes, within bounds."""
    value = g.take(at_least(1), lambda v: v.shape[0] > 0)
    index = g.take(integral, lambda v: v.dim <= 2)
    code = g.choice(["{0}[{1} % {0}.shape[0]]", "{0}[{1}.clamp(0, {0}.shape[0] - 1)]",
                     "{0}[torch.remainder({1}, {0}.shape[0]) - {0}.shape[0]]",
                     "torch.index_select({0}, 0, {1}.reshape(-1) % {0}.shape[0])"])  # fmt: skip
    return Draft(code, [value, index], "move")


@op(1.0)
def gather(g: Context) -> Draft:
    value = g.take(at_least(1), lambda v: v.shape[-1] > 0)
    index = g.take(integral, lambda v: v.dim == value.dim and v.dtype is torch.int64)
    code = g.choice(["torch.gather({0}, -1, {1} % {0}.shape[-1])",
                     "torch.take_along_dim({0}, {1} % {0}.shape[-1], -1)"])  # fmt: skip
    return Draft(code, [value, index], "move")


@op(0.7)
def gather_input(g: Context) -> Draft:
    value = g.take(at_least(1), lambda v: v.shape[-1] > 0)
    shape = (*value.shape[:-1], 2)
    return Draft("torch.gather({0}, -1, {1})", [value, _index(g, value.shape[-1], shape, negative=False)], "move")


@op(0.7)
def index_select(g: Context) -> Draft:
    value = g.take(at_least(1))
    dim = g.dim_of(value)
    return Draft(f"torch.index_select({{0}}, {dim}, {{1}})", [value, _index(g, value.shape[dim], (3,), False)], "move")


@op(1.0)
def scatter(g: Context) -> Draft:
    value = g.take(numeric, at_least(1), lambda v: v.shape[-1] >= 2)
    index = "torch.arange({0}.shape[-1]).flip(0).expand({0}.shape)"
    if g.chance(0.5):
        source = g.take(lambda v: v.shape == value.shape and v.dtype == value.dtype)
        return Draft(f"{{0}}.scatter(-1, {index}, {{1}})", [value, source], "move")
    return Draft("{0}.scatter(-1, torch.zeros_like({0}, dtype=torch.int64)[..., :1], 2)", [value], "move")


@op(0.8)
def scatter_add(g: Context) -> Draft:
    value = g.take(numeric, at_least(1), lambda v: v.shape[-1] >= 1)
    index = _index(g, value.shape[-1], value.shape, negative=False)
    code = g.choice(["{0}.scatter_add(-1, {1}, {0})", 'torch.zeros_like({0}).scatter_reduce(-1, {1}, {0}, "sum")',
                     'torch.zeros_like({0}).scatter_reduce(-1, {1}, {0}, "amax", include_self=False)',
                     'torch.scatter_reduce({0}, -1, {1}, {0}, reduce="amax")'])  # fmt: skip
    return Draft(code, [value, index], "arith")


@op(0.7)
def index_add(g: Context) -> Draft:
    value = g.take(floating, at_least(1), lambda v: v.shape[0] >= 1)
    index = _index(g, value.shape[0], (value.shape[0],), negative=False)
    code = g.choice(["{0}.index_add(0, {1}, {0})", "torch.zeros_like({0}).index_add(0, {1}, {0}, alpha=2)",
                     "{0}.index_fill(0, {1}, 0.5)",
                     "torch.zeros_like({0}).index_put(({1},), {0}, accumulate=True)"])  # fmt: skip
    return Draft(code, [value, index], "arith")


@op(0.7)
def index_copy(g: Context) -> Draft:
    value = g.take(at_least(1), lambda v: v.shape[0] >= 2)
    return Draft("torch.zeros_like({0}).index_copy(0, torch.arange({0}.shape[0]).flip(0), {0})", [value], "move")


@op(0.8)
def index_put_constant(g: Context) -> Draft:
    value = g.take(floating, at_least(2), lambda v: min(v.shape[:2]) >= 2)
    code = g.choice(["{0}.index_put((torch.tensor([0, 1]), torch.tensor([-1, 0])), torch.tensor(2.0, dtype={0}.dtype))",
                     "{0}.index_put((torch.tensor([-1]),), {0}[:1])"])  # fmt: skip
    return Draft(code, [value], "move")


@op(1.0)
def embedding(g: Context) -> Draft:
    index = _index(g, 5, tuple(g.choice([(2,), (2, 3), (3,)])), negative=False)
    padding = g.choice(["", ", padding_idx=0"])
    name = g.attribute("m", f"torch.nn.Embedding(5, {g.choice([3, 4])}{padding})")
    return Draft(f"self.{name}({{0}})", [index], "move", uses=(name,))


@op(0.4)
def embedding_bag(g: Context) -> Draft:
    index = g.input(["B", 3], "int64", "index", 0, 5)
    mode = g.choice(["sum", "mean", "max"])
    name = g.attribute("m", f'torch.nn.EmbeddingBag(5, 3, mode="{mode}")')
    return Draft(f"self.{name}({{0}})", [index], uses=(name,))


@op(0.8)
def masked_assign(g: Context) -> Draft:
    value = g.take(floating)
    mask = g.take(boolean, lambda v: v.shape == value.shape)
    code = g.choice(["torch.masked_scatter({0}, {1}, torch.ones_like({0}))", "{0} * {1}", "{0}.masked_fill(~{1}, 0)",
                     "torch.where({1}, {0}, {0}.mean())"])  # fmt: skip
    return Draft(code, [value, mask], "no" if "mean" in code else "arith")


@op(0.15)
def masked_select(g: Context) -> Draft:
    """A size depends on values: Dynamo breaks the graph."""
    value = g.take(floating)
    mask = g.take(boolean, lambda v: v.shape == value.shape)
    return Draft("{0}[{1}].sum()", [value, mask], "arith")


@op(0.4)
def take_flat(g: Context) -> Draft:
    value = g.take(at_least(1), lambda v: v.tensor.numel() > 0)
    return Draft(
        "torch.take({0}, {1} % {0}.numel())", [value, g.take(integral, lambda v: v.dtype.itemsize == 8)], "move"
    )


@op(0.3)
def searchsorted(g: Context) -> Draft:
    value = g.take(floating, dims(1, 2), lambda v: v.exact and v.dtype is torch.float32)
    return Draft("torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), {0}.contiguous(), right=True)", [value], "arith")


@op(0.5)
def select_scatter(g: Context) -> Draft:
    value = g.take(at_least(2), lambda v: v.shape[0] >= 2, lambda v: not v.overlaps_itself)
    code = g.choice(
        ["torch.select_scatter({0}, {0}[0], 0, 1)", "torch.slice_scatter({0}, {0}[1:], 0, 0, {0}.shape[0] - 1)"]
    )
    return Draft(code, [value], "move")
