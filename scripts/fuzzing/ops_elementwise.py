"""Elementwise operators: unary, binary, comparisons, casts."""

from __future__ import annotations

from fuzzing.context import Context
from fuzzing.draft import Draft, Skip, Val
from fuzzing.registry import add, boolean, exact, floating, integral, like, numeric, op

_ROUNDING = [
    "torch.exp({0}.clamp(max=3))", "torch.sin({0})", "torch.cos({0})", "torch.tanh({0})", "torch.sigmoid({0})",
    "torch.erf({0})", "torch.log1p({0}.abs())", "torch.sqrt({0}.abs() + 0.25)", "torch.rsqrt({0}.abs() + 1)",
    "F.gelu({0})", 'F.gelu({0}, approximate="tanh")', "F.silu({0})", "F.softplus({0})", "F.mish({0})", "F.elu({0})",
    "F.selu({0})", "F.celu({0})", "F.hardswish({0})", "F.hardsigmoid({0})", "F.leaky_relu({0}, 0.1)",
    "F.logsigmoid({0})", "F.softsign({0})", "torch.atan({0})", "torch.sinh({0}.clamp(-3, 3))", "torch.asinh({0})",
    "torch.expm1({0}.clamp(max=3))", "torch.log({0}.abs() + 0.5)", "torch.reciprocal({0}.abs() + 0.5)",
    "torch.pow({0}.abs() + 0.1, 1.5)", "torch.exp2({0}.clamp(max=3))", "torch.log2({0}.abs() + 0.5)",
    "F.tanhshrink({0})", "torch.acos({0}.clamp(-0.9, 0.9))", "torch.atanh({0}.clamp(-0.9, 0.9))", "{0} / 3",
    "2 / ({0}.abs() + 1)", "{0} * 0.3", "torch.sinc({0}.detach())", "F.glu({0})",
    "torch.logit({0}.sigmoid(), eps=1e-3)",
    "torch.special.xlog1py({0}.abs(), {0}.abs())", "torch.cosh({0}.clamp(-3, 3))",
]  # fmt: skip
_EXACT = [
    "torch.relu({0})", "-{0}", "{0}.abs()", "{0}.clamp(-1, 1)", "F.relu6({0})", "F.hardtanh({0})", "{0} + 1",
    "1 - {0}", "{0} * 2", "{0} * -1", "torch.clamp({0}, min=0.5)", "F.threshold({0}, 0.25, 0.0)", "{0} * 1",
    "{0} + 0", "torch.square({0})", "{0} ** 2", "F.softshrink({0}, 0.25)", "{0} / 2", "{0}.clip(max=1)",
    "torch.rsub({0}, 2)", "{0} - 0.5", "torch.nan_to_num({0})", "torch.mul({0}, {0})", "{0} - {0}",
]  # fmt: skip
_MOVES = [
    "{0}.clone()", "{0}.detach()", "{0}.contiguous()", "torch.positive({0})", "F.dropout({0}, 0.0)",
    "F.dropout({0}, 0.5, training=False)", "torch.nn.Identity()({0})", "{0}.detach().clone()", "{0}.to({0}.dtype)",
    "torch.zeros_like({0})", "torch.ones_like({0})", "torch.full_like({0}, 1.5)", "{0}.new_zeros({0}.shape)",
]  # fmt: skip
_STEPS = [
    "torch.floor({0})", "torch.ceil({0})", "torch.round({0})", "torch.trunc({0})", "torch.sign({0})",
    "torch.frac({0})", "F.hardshrink({0}, 0.25)", "torch.heaviside({0}, torch.ones_like({0}))", "{0} % 2", "{0} // 2",
    "torch.fmod({0}, 3)", "torch.remainder({0}, -3)", 'torch.div({0}, 2, rounding_mode="trunc")',
    'torch.div({0}, 4, rounding_mode="floor")',
]  # fmt: skip
_ON_INTEGERS = [
    "{0} + 1", "{0} * 3", "-{0}", "{0}.abs()", "{0} % 5", "{0} // 3", "torch.clamp({0}, 0, 3)", "torch.sign({0})",
    "torch.bitwise_and({0}, 7)", "torch.bitwise_not({0})", "{0} << 1", "{0} >> 1", "{0} ** 2", "torch.fmod({0}, 4)",
    "{0} / 2", "torch.square({0})", "{0} - {0}.min()", "{0} * 100003",
]  # fmt: skip
_BINARY_EXACT = [
    "torch.add({0}, {1})", "{0} - {1}", "{0} * {1}", "torch.maximum({0}, {1})", "torch.minimum({0}, {1})",
    "torch.add({0}, {1}, alpha=2)", "torch.sub({0}, {1}, alpha=0.5)", "torch.fmax({0}, {1})", "{1} + {0} * 2",
    "torch.clamp({0}, min={1})", "torch.copysign({0}, {1} - 0.3)",
]  # fmt: skip
_BINARY_ROUNDING = [
    "{0} / ({1}.abs() + 1)", "torch.atan2({0}, {1}.abs() + 0.5)", "torch.pow({0}.abs() + 0.5, {1}.clamp(-2, 2))",
    "torch.hypot({0}, {1})", "torch.logaddexp({0}, {1})", "torch.lerp({0}, {1}, 0.3)",
    "torch.addcmul({0}, {1}, {1}, value=0.5)", "torch.addcdiv({0}, {1}, {1}.abs() + 1)",
    "torch.xlogy({0}.abs(), {1}.abs() + 0.5)", "F.mse_loss({0}, {1})", "F.smooth_l1_loss({0}, {1})",
    'F.huber_loss({0}, {1}, reduction="none")', "torch.cosine_similarity({0}, {1}, dim=-1)",
    "F.binary_cross_entropy_with_logits({0}, {1}.sigmoid())", 'F.kl_div({0}, {1}.softmax(-1), reduction="sum")',
]  # fmt: skip
# Divisors must be exact: + 1 would round the largest floats, which changes quotients and remainders.
_BINARY_STEPS = [
    "torch.floor_divide({0}, {1}.abs().clamp(min=1))", "torch.remainder({0}, {1}.abs().clamp(min=1))",
    "torch.fmod({0}, {1}.abs().clamp(min=1))", 'torch.div({0}, {1}.abs().clamp(min=1), rounding_mode="trunc")',
]  # fmt: skip
_INTEGER_PAIRS = [
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "torch.maximum({0}, {1})", "torch.bitwise_and({0}, {1})",
    "torch.bitwise_or({0}, {1})", "torch.bitwise_xor({0}, {1})", "{0} % ({1}.abs() + 1)", "{0} // ({1}.abs() + 1)",
    'torch.div({0}, {1}.abs() + 1, rounding_mode="trunc")', "torch.gcd({0}, {1})", "{0} / ({1}.abs() + 1)",
]  # fmt: skip
_LOGIC = [
    "torch.logical_and({0}, {1})", "{0} | {1}", "{0} ^ {1}", "{0} & ~{1}", "{0} == {1}", "torch.logical_xor({0}, {1})"
]  # fmt: skip
_COMPARE = ["<", "<=", ">", ">=", "==", "!="]
_CASTS = [
    "{0}.float()", "{0}.half()", "{0}.bfloat16()", "{0}.long()", "{0}.int()", "{0}.bool()", "{0}.to(torch.float32)",
    "{0}.to(torch.int64)", "{0}.to(torch.float16).float()", "{0}.to(torch.bfloat16).float()",
    "{0}.to(torch.float32, copy=True)",
]  # fmt: skip


def _name(code: str) -> str:
    kept = code.replace("torch.", "").replace("F.", "").replace("{0}", "x").replace("{1}", "y")
    return kept.replace(" ", "")


def _unary(code: str, kind: str, *conditions: object, weight: float = 0.3, prefix: str = "") -> None:
    def build(g: Context) -> Draft:
        return Draft(code, [g.take(*conditions)], kind)  # type: ignore[arg-type]

    add(prefix + _name(code), build, weight)


def _binary(code: str, kind: str, *conditions: object, weight: float = 0.4, prefix: str = "") -> None:
    def build(g: Context) -> Draft:
        first = g.take(*conditions)  # type: ignore[arg-type]
        second = g.take(like(first), *conditions)  # type: ignore[arg-type]
        pair = [first, second] if g.chance(0.5) else [second, first]
        return Draft(code, pair, kind)

    add(prefix + _name(code), build, weight)


for _code in _ROUNDING:
    _unary(_code, "no", floating)
for _code in _EXACT:
    _unary(_code, "arith", floating)
for _code in _MOVES:
    _unary(_code, "move", lambda v: True)
for _code in _STEPS:
    _unary(_code, "arith", floating, exact)
for _code in _ON_INTEGERS:
    _unary(_code, "arith", integral, prefix="int:")
for _code in _BINARY_EXACT:
    _binary(_code, "arith", floating)
for _code in _BINARY_ROUNDING:
    _binary(_code, "no", floating)
for _code in _BINARY_STEPS:
    _binary(_code, "arith", floating, exact)
for _code in _INTEGER_PAIRS:
    _binary(_code, "arith", integral, prefix="int:")
for _code in _LOGIC:
    _binary(_code, "arith", boolean, prefix="bool:")
_unary("~{0}", "arith", boolean, prefix="bool:")
_unary("{0}.logical_not()", "arith", lambda v: v.exact or v.is_bool)


def _cast(code: str) -> None:
    def build(g: Context) -> Draft:
        value = g.take(exact)
        # An overflow says nothing about a compiler, and `large` inputs exceed float16 in call B.
        narrow = integral(value) and ("torch.float16" in code or "half" in code)
        return Draft(code.replace("{0}", "{0}.clamp(-1000, 1000)") if narrow else code, [value], "arith")

    add(f"cast:{_name(code)}", build, 0.4)


for _code in _CASTS:
    _cast(_code)


@op(2.0)
def compare(g: Context) -> Draft:
    first = g.take(numeric, exact)
    sign = g.choice(_COMPARE)
    if g.chance(0.5):
        return Draft(f"{{0}} {sign} {g.choice(['0', '0.5', '1'])}", [first], "arith")
    return Draft(f"{{0}} {sign} {{1}}", [first, g.take(like(first), exact)], "arith")


@op(1.5)
def where(g: Context) -> Draft:
    condition = _condition(g)
    first = g.take(numeric, lambda v: _broadcasts(v, condition))
    if g.chance(0.3):
        return Draft("torch.where({0}, {1}, 0.0)" if first.is_float else "torch.where({0}, {1}, 0)",
                     [condition, first], "move")  # fmt: skip
    return Draft("torch.where({0}, {1}, {2})", [condition, first, g.take(like(first))], "move")


@op(1.0)
def masked_fill(g: Context) -> Draft:
    condition = _condition(g)
    value = g.take(numeric, lambda v: _broadcasts(v, condition))
    return Draft(f"{{0}}.masked_fill({{1}}, {g.choice(['0', '1', '-2'])})", [value, condition], "move")


@op(1.0)
def mixed_types(g: Context) -> Draft:
    """Two types in one operator, which torch promotes."""
    first = g.take(lambda v: True)
    second = g.take(lambda v: v.dtype != first.dtype and _broadcasts(v, first))
    if first.is_bool and second.is_bool:
        raise Skip
    return Draft(g.choice(["{0} + {1}", "{0} * {1}", "torch.maximum({0}, {1})"]), [first, second], "arith")


@op(0.5)
def type_as(g: Context) -> Draft:
    return Draft("{0}.type_as({1})", [g.take(exact), g.take(floating)], "arith")


@op(0.4)
def ternary_clamp(g: Context) -> Draft:
    first = g.take(floating)
    return Draft("torch.clamp({0}, {1} - 1, {1} + 1)", [first, g.take(like(first))], "arith")


@op(0.4)
def finite(g: Context) -> Draft:
    return Draft(g.choice(["torch.isfinite({0})", "torch.isnan({0})", "torch.isinf({0})"]), [g.take(floating)], "arith")


def _condition(g: Context) -> Val:
    return g.take(boolean)


def _broadcasts(value: Val, other: Val) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(value.shape), reversed(other.shape), strict=False))
