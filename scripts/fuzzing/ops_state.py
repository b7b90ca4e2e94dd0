"""Effects and control flow: buffers, attributes, in-place writes, branches, graph breaks."""

from __future__ import annotations

import torch

from fuzzing.context import Context
from fuzzing.draft import Draft, Skip, Val
from fuzzing.registry import at_least, boolean, dims, exact, floating, like, numeric, op

_IN_PLACE = [
    "{0}.add_(1)", "{0}.mul_(2)", "{0}.relu_()", "{0}.clamp_(-1, 1)", "{0}.neg_()", "{0}.zero_()", "{0}.fill_(0.5)",
    "{0}.sub_(0.5)", "{0}.abs_()", "F.relu({0}, inplace=True)",
]  # fmt: skip
_IN_PLACE_ROUNDING = ["{0}.sigmoid_()", "{0}.tanh_()", "{0}.mul_(0.3)", "{0}.div_(3)", "F.silu({0}, inplace=True)"]
_PARTS = [
    "{0}[0] = 1", "{0}[..., 0] = 2", "{0}[:, -1] = 0", "{0}[0].add_(1)", "{0}[..., ::2].mul_(2)",
    "{0}.transpose(0, -1)[0].zero_()", "{0}.view(-1)[0] = 3", "{0}[torch.tensor([0, -1])] = 1", "{0}[-1] += 1",
    "{0}.select(0, 0).copy_({0}.select(0, -1))", "{0}.flatten()[1:].mul_(2)", "{0}.diagonal().fill_(1)",
    "{0}[{0} > 0] = 0.25", "{0}.index_fill_(0, torch.tensor([0]), 2)", "{0}.masked_fill_({0} < 0, 0)",
]  # fmt: skip


def _is_writable(value: Val) -> bool:
    try:
        return not (value.tensor.requires_grad and value.tensor.is_leaf)
    except RuntimeError:
        # One of several views that one operator returned, after a write to their base: torch refuses to use it.
        return False


def _writable(g: Context) -> Val:
    value = g.take(numeric, _is_writable)
    if value.name.startswith("x") and g.chance(0.4):
        raise Skip
    return value


@op(1.5)
def in_place(g: Context) -> Draft:
    value = _writable(g)
    if value.is_float and g.chance(0.3):
        return Draft(g.choice(_IN_PLACE_ROUNDING), [value], "no", out=0, writes=(0,))
    return Draft(g.choice(_IN_PLACE), [value], "arith", out=0, writes=(0,))


@op(1.5)
def in_place_part(g: Context) -> Draft:
    value = _writable(g)
    if not value.dim:
        raise Skip
    code = g.choice(_PARTS)
    if (" > " in code or " < " in code) and not exact(value):
        raise Skip
    return Draft(code, [value], "arith", out=0, writes=(0,))


@op(1.0)
def in_place_pair(g: Context) -> Draft:
    value = _writable(g)
    other = g.take(like(value))
    code = g.choice(["{0}.add_({1})", "{0}.copy_({1})", "{0}.mul_({1})", "{0}[...] = {1}", "{0}.sub_({1}, alpha=2)"])
    return Draft(code, [value, other], "move" if "copy" in code or "[" in code else "arith", out=0, writes=(0,))


@op(0.7)
def in_place_result(g: Context) -> Draft:
    """The result of an in-place operator is its argument under another name."""
    value = _writable(g)
    return Draft(g.choice(["{0}.add_(1)", "{0}.mul_(2)", "{0}.clamp_(min=0)"]), [value], "arith", writes=(0,))


def _like(value: Val) -> str:
    return f"torch.zeros({tuple(value.shape)}, dtype={value.dtype})"


def _constant_shape(g: Context, value: Val) -> bool:
    """Whether a buffer of this value's shape fits every call."""
    sizes = set(g.mode.sizes[0].values()) if g.mode.sizes[0] != g.mode.sizes[1] else set()
    return not sizes & set(value.shape)


def _stored(g: Context) -> Val:
    return g.take(numeric, lambda v: _constant_shape(g, v) and v.dim > 0)


@op(1.0)
def buffer_read(g: Context) -> Draft:
    value = g.take(floating, at_least(1), lambda v: 0 < v.shape[-1] < 9)
    values = ", ".join(str(g.integer(-8, 8) / 4) for _ in range(value.shape[-1]))
    name = g.buffer(f"torch.tensor([{values}], dtype={value.dtype})")
    return Draft(
        g.choice([f"{{0}} + self.{name}", f"torch.maximum({{0}}, self.{name})"]), [value], "arith", uses=(name,)
    )


@op(1.2)
def buffer_store(g: Context) -> Draft:
    """The model stores a value, and may use the one of the previous call."""
    value = _stored(g)
    name = g.buffer(_like(value))
    if g.chance(0.5):
        return Draft(f"self.{name}.copy_({{0}}.detach())", [value], "move", out=0, uses=(name,))
    code = f"({{0}} - self.{name}, self.{name}.copy_({{0}}.detach()))[0]"
    return Draft(code, [value], "arith", uses=(name,))


@op(1.0)
def ema(g: Context) -> Draft:
    value = g.take(floating, at_least(1), lambda v: _constant_shape(g, v))
    name = g.buffer(_like(value))
    code = g.choice([f"{{0}} - self.{name}.mul_(0.9).add_({{0}}.detach(), alpha=0.1)",
                     f"{{0}} - self.{name}.lerp_({{0}}.detach(), 0.25)",
                     f"{{0}} - self.{name}.copy_(0.9 * self.{name} + 0.1 * {{0}}.detach())"])  # fmt: skip
    return Draft(code, [value], uses=(name,))


@op(1.0)
def counter(g: Context) -> Draft:
    name = g.buffer(
        g.choice(["torch.zeros(1)", "torch.zeros((), dtype=torch.int64)", "torch.zeros(2, dtype=torch.int64)"])
    )
    value = g.take(floating, lambda v: v.dtype is torch.float32)
    if g.chance(0.5):
        return Draft(f"{{0}} + self.{name}.add_(1).sum()", [value], "arith", uses=(name,))
    return Draft(f"self.{name}.add_(1)", [], "arith", out=0, uses=(name,))


@op(0.5)
def buffer_assigned(g: Context) -> Draft:
    """A buffer that is reassigned instead of written to."""
    name = g.buffer("torch.zeros(1)")
    value = g.take(floating, lambda v: v.dtype is torch.float32)
    return Draft(f"self.{name} = self.{name} + {{0}}.detach().amax()", [value], "arith", out=0, uses=(name,))


@op(0.4)
def attribute_counter(g: Context) -> Draft:
    name = g.attribute("a", "0")
    return Draft(f"self.{name} += 1", [], "arith", out=0, uses=(name,))


@op(0.4)
def attribute_tensor(g: Context) -> Draft:
    name = g.attribute("a", "torch.zeros(1)")
    value = g.take(floating, lambda v: v.dtype is torch.float32)
    return Draft(
        f"self.{name} = (self.{name} + {{0}}.detach().amin()).clamp(-8, 8)", [value], "arith", out=0, uses=(name,)
    )


@op(0.5)
def attribute_read(g: Context) -> Draft:
    kept = [name for name, code in g.state.items() if name[0] in "ab" and not code.startswith("0")]
    if not kept:
        raise Skip
    name = g.choice(kept)
    return Draft(f"self.{name} * 1", [], "arith", uses=(name,))


@op(1.5)
def cond(g: Context) -> Draft:
    predicate = g.take(lambda v: (v.exact or not v.is_float) and v.tensor.numel() > 0)
    value = g.take(floating)
    code = g.choice(["lambda a: a * 2, lambda a: a + 1", "lambda a: torch.relu(a) + 1, lambda a: a.sin()",
                     "lambda a: a.clone(), lambda a: -a", "lambda a: a.softmax(-1), lambda a: a * 0.5"])  # fmt: skip
    # Counted, since rounding would decide whether a sum of 0 is positive.
    test = "{0}.any()" if predicate.is_bool else "({0} > 0).sum() > {0}.numel() // 2"
    return Draft(f"cond({test}, {code}, ({{1}},))", [predicate, value])


@op(0.5)
def python_branch(g: Context) -> Draft:
    value = g.take(floating, at_least(1))
    return Draft("{0} * 2 if {0}.shape[0] > 2 else {0} + 1", [value], "arith")


@op(0.2)
def value_branch(g: Context) -> Draft:
    """Python branches on a tensor's value: Dynamo breaks the graph."""
    predicate = g.take(lambda v: (v.exact or not v.is_float) and v.tensor.numel() > 0)
    return Draft("{1} * 2 if {0}.sum() > 0 else {1} + 1", [predicate, g.take(floating)], "arith")


@op(0.4)
def python_value(g: Context) -> Draft:
    """The computation uses a number that Python reads from a tensor."""
    source = g.take(lambda v: (v.exact or not v.is_float) and v.tensor.numel() > 0)
    number = g.choice([
        "{0}.reshape(-1)[0].item()", "{0}.reshape(-1).tolist()[0]", "float({0}.reshape(-1)[-1])", "int({0}.sum())",
        "len({0}.nonzero())",
    ])  # fmt: skip
    return Draft(f"{{1}} * {number}", [source, g.take(floating)])


@op(0.15)
def graph_break(g: Context) -> Draft:
    return Draft("torch._dynamo.graph_break()", [], "move", out=0) if g.lines else Draft("None", [], "move", out=0)


@op(0.4)
def python_loop(g: Context) -> Draft:
    value = g.take(floating, dims(2))
    return Draft("torch.stack([row * 2 for row in {0}])", [value], "arith")


@op(0.4)
def written_copy(g: Context) -> Draft:
    """A tensor that is created and then filled."""
    value = g.take(numeric, at_least(2), lambda v: v.shape[0] >= 2)
    code = "torch.zeros_like({0}).copy_({0})"
    return Draft(
        g.choice([code, "torch.empty_like({0}).copy_({0})", "torch.empty_like({0}).fill_(1)"]), [value], "move"
    )


@op(0.3)
def bool_mask_any(g: Context) -> Draft:
    mask = g.take(boolean, at_least(1))
    value = g.take(lambda v: v.is_float and v.shape == mask.shape and v.dtype is torch.float32)
    return Draft("({1} * {0}).sum(-1) / {0}.sum(-1).clamp(min=1)", [mask, value])
