"""Decompositions: correct results on OpenVINO where its own conversions are wrong or missing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchserve_openvino as tov
from helpers import check

NAN, INF = float("nan"), float("inf")
# By default, graphs as small as these run in eager PyTorch.
ALL: dict[str, Any] = {"min_partition_us": 0}
aten = torch.ops.aten
EDGES = torch.tensor([NAN, INF, -INF, -0.0, 0.0, 1.0, -1.0, 0.5, -2.5, 1e-7, 3e8, -100.0])
A, B = EDGES.repeat(len(EDGES)), EDGES.repeat_interleave(len(EDGES))
X = torch.linspace(-3, 3, 60).reshape(3, 4, 5)
TIES = torch.tensor([[2, 7, 7, 1, 1, 7], [0, 0, 0, 3, 3, 1]])
POINTS = torch.linspace(-1, 1, 12).reshape(4, 3) ** 2
SORTED = torch.tensor([-1.0, 0.0, 0.0, 1.0, 2.0])

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "order of equal values": (lambda x: (x.sort(1), x.argsort(0)), (TIES,)),
    "first of the largest": (lambda x: (x.max(1), x.min(1), x.float().max(0)), (TIES,)),
    "extremes hand on NaN": (lambda x: (x.amax(1), x.amin(), x.argmin(1)), (torch.tensor([[1.0, NAN], [3.0, 2.0]]),)),
    "extremes of booleans": (lambda x: (x.amax(1), x.amin(0), x.max(), torch.maximum(x, x[:1])), (X[0] > 0,)),
    "division that truncates": (lambda x: torch.div(x, 0.1, rounding_mode="trunc"), (torch.tensor([1e30, 2.7, NAN]),)),
    "truth": (lambda x: (x.logical_not(), x.bool(), x.logical_and(x), x.logical_xor(1 - x), x.any()), (EDGES,)),
    "truth of NaN": (lambda x: (x.any(), x.all(), x.reshape(1).any(0), x.reshape(1).all(0)), (torch.tensor(NAN),)),
    "truth of bytes": (
        lambda x: (x.any(), x.all(), x.any(1), x.all(1), torch.any(x, (0, 1)), torch.all(x, (0, 1)), x.any(1, True)),
        (torch.tensor([[0, 3], [2, 1]], dtype=torch.uint8),),
    ),
    "absolute values of bytes": (torch.abs, (torch.tensor([1, 2, 3, 200, 0], dtype=torch.uint8),)),
    "identity of more than 255 rows": (
        lambda x: (x @ torch.eye(256), torch.eye(300, 256, dtype=torch.int64)), (torch.ones(2, 256),),
    ),
    "integers have no NaN": (lambda x: (x.isnan(), x.isinf(), (x > 1).sign()), (TIES,)),
    "trunc and frac": (lambda x: (x.trunc(), x[3:].frac()), (EDGES,)),
    "exponentials": (lambda x: (x.expm1(), x[1:].exp2()), (EDGES,)),
    "expm1 of small values": (lambda x: x.expm1() * 1e6, (torch.tensor([1e-6, -2e-6, 3e-7]),)),
    "signs": (lambda x, y: (x.signbit(), torch.copysign(x, y)), (A, B)),
    "hypot": (torch.hypot, (A, B)),
    "fmax and fmin": (lambda x, y: (torch.fmax(x, y), torch.fmin(x, y)), (A, B)),
    "quotients of numbers": (lambda x: x * torch.div(x.shape[0], 2, rounding_mode="trunc"), (X,)),
    "running products": (lambda x: (x.cumprod(1), x.cumprod(0), x[0, 0].cumprod(0)), (X,)),
    "running sums of exponentials": (lambda x: (x.logcumsumexp(0), x.logcumsumexp(-1)), (EDGES.reshape(3, 4),)),
    "long running sums of exponentials": (lambda x: x.logcumsumexp(0), (torch.linspace(-50, 50, 1000),)),
    "running extremes": (lambda x: (*x.cummax(0), *x.cummin(0)), (torch.cat([TIES.flatten() * 1.0, EDGES, EDGES]),)),
    "running extremes of bytes": (
        lambda x: (*x.to(torch.uint8).cummax(1), *(x > 1).cummin(0), *x.cummax(-1)), (TIES,),
    ),
    "bytes of another sign": (
        lambda x: (x.view(torch.int8) + 1, x.view(torch.int8).view(torch.uint8) + 1, (x > 130).view(torch.uint8) + 1),
        (torch.arange(256, dtype=torch.uint8),),
    ),
    "ranges of floats": (lambda x: (x[:5, :1] + torch.arange(5.0), x + torch.arange(0, 3.5, x.shape[0] / 2)[:1]), (X,)),
    "quotients by powers of 2": (
        lambda x: (x % 0.25, torch.fmod(x, -2), x // 8, torch.div(x, 0.1, rounding_mode="trunc")),
        (X * 7.3,),
    ),
    "atan2": (torch.atan2, (A, B)),
    "angle": (torch.angle, (EDGES,)),
    "atan and erfc": (lambda x: (x.atan(), x.erfc()), (EDGES,)),
    "logaddexp": (torch.logaddexp, (A, B)),
    "logsumexp": (lambda x: (x.logsumexp(1), x.logsumexp(0)), (torch.tensor([[1.0, NAN], [INF, 2.0], [-INF, -INF]]),)),
    "margins of labels": (
        lambda x, y: [F.multilabel_margin_loss(x, y, reduction=how) for how in ("none", "mean", "sum")],
        (torch.linspace(-2, 2, 12).reshape(3, 4) ** 2, torch.tensor([[2, -1, 1, 0], [-1, 0, 0, 0], [3, 1, 2, 0]])),
    ),
    "logsigmoid": (F.logsigmoid, (torch.tensor([-1e4, -100.0, 0.0, 100.0]),)),
    "clamp by tensors": (lambda x, y: torch.clamp(x, y, y + 2), (TIES, torch.tensor(1.5))),
    "numbers": (lambda x: (x | 9, aten.bitwise_xor.Scalar(x, 5), aten.sub.Scalar(x, 2, 3)), (TIES,)),
    "round to decimals": (lambda x: (x.round(decimals=2), x.round(decimals=-1)), (X * 7.123,)),
    "diagonal": (lambda x: (x.diagonal(1, 0, 2), x.diagonal(-1), x[0].diag()), (X,)),
    "cdist": (lambda x: [torch.cdist(x, x[1:], p) for p in (0.0, 1.0, 2.0, 3.0, INF)], (POINTS,)),
    "pdist": (lambda x: [F.pdist(x, p) for p in (1.0, 2.0, INF)], (POINTS,)),
    "searchsorted": (lambda s, x: [torch.searchsorted(s, x, right=r) for r in (True, False)], (SORTED, EDGES)),
    "bucketize": (lambda s, x: torch.bucketize(x, s, out_int32=True), (SORTED, EDGES)),
    "index_fill": (lambda x, i: x.index_fill(1, i, 9.5), (X, torch.tensor([-1, 0, 0]))),
    "index_add": (lambda x, i: x.index_add(1, i, x[:, :3], alpha=2), (X, torch.tensor([3, 0, 3]))),
    "products whose summand nobody wrote": (
        lambda x, b, c: (torch.addmm(x, b[0], c[0], beta=0), torch.baddbmm(x[None], b, c, beta=0, alpha=0.5)),
        (X[0, :, :4] * NAN, X, X.transpose(1, 2)),
    ),
    "addbmm": (
        lambda x, b, c: (torch.addbmm(x, b, c, beta=0.5, alpha=2), torch.addbmm(x * NAN, b, c, beta=0)),
        (X[0, :, :4], X, X.transpose(1, 2)),
    ),
    "scatter_add": (lambda x, i: x.scatter_add(0, i, x), (X[0], torch.tensor([[0, 3, 3, 1, 0]]))),
    "shuffles": (
        lambda x: (F.pixel_unshuffle(x, 2), F.channel_shuffle(x, 2), x.repeat_interleave(3, 1)),
        (X.reshape(1, 2, 6, 5)[..., :4],),
    ),
    "masked_scatter": (lambda x, m, y: x.masked_scatter(m, y), (X, X > 0, -X)),
    "masked_scatter, broadcast": (lambda x, m, y: x.masked_scatter(m, y), (X[0, 0], X[0] > 0, -X)),
    "average with a divisor": (lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=-2), (X,)),
    "rot90": (lambda x: [torch.rot90(x, k) * 1 for k in (1, 2, 3, 4)], (X,)),
    "safe softmax": (lambda x: aten._safe_softmax.default(x, 1), (torch.tensor([[-INF, -INF], [1.0, 2.0]]),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_right_and_whole_on_openvino(name: str) -> None:
    function, args = CASES[name]
    check(function, *args, strides=False, options=ALL)


POWER = "may exceed 2^24"
REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "as_strided": (
        lambda x: x.as_strided((2, 2), (1, 1), 0) * 2, (X.flatten()[7:],), "memory that is not part of its input",
    ),
    "bytes of another type": (lambda x: x.view(torch.int32) == 0, (X,), "can't read bytes as another type"),
    "abs of a range": (lambda x: (torch.arange(-2.0, 3.0) - 0.5).abs() + x, (torch.ones(5),), "abs of a range"),
    "scatter_add of int64": (
        lambda x, i: torch.zeros(3, dtype=torch.int64).scatter_add(0, i, x), (TIES[0, :3], TIES[1, :3]), "32 bits",
    ),
    "boolean sum": (lambda x: torch.add(x, x, alpha=False), (X > 0,), "booleans with alpha"),
    "no decomposition": (lambda x: x.cumsum(0).polygamma(1), (X.abs() + 1,), "polygamma"),
    "mean of integers": (
        lambda x, i: x.scatter_reduce(0, i, x, "mean").abs(), (-TIES[0].to(torch.int32), TIES[1] % 3), "rounds it down",
    ),
    "product of int32": (lambda x: (x @ x.T).abs(), (TIES.to(torch.int32),), POWER),
    "power of int32": (lambda x: (x**2).abs(), (TIES.to(torch.int32),), POWER),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_reason(name: str) -> None:
    function, args, reason = REFUSED[name]
    compiled = check(function, *args, strides=False, coverage=None, fallbacks={"unsupported_op": 1}, options=ALL)
    assert reason in compiled.report.fallbacks[0].reason


def test_a_decomposition_that_would_not_run_leaves_its_operator_whole() -> None:
    compiled = check(
        lambda x: torch.special.i0e(x) + 1,
        X,
        coverage=None,
        fallbacks={"unsupported_op": 1},
        options=ALL,
    )
    assert compiled.report.fallbacks[0].op == "aten.special_i0e.default"


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
def test_margins_of_labels_in_a_module(backend: Any) -> None:
    compiled = tov.compile(nn.MultiLabelMarginLoss().eval(), backend=backend, options=ALL)
    inputs = torch.linspace(-2, 2, 12).reshape(3, 4) ** 2, torch.tensor([[2, -1, 1, 0], [-1, 0, 0, 0], [3, 1, 2, 0]])
    check(compiled.eager, *inputs, compiled=compiled)


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("add", [torch.add, torch.sub, torch.rsub])
def test_a_scaled_sum_of_symbolic_numbers(add: Callable[..., Any], backend: Any) -> None:
    x = torch.tensor([0.25, 0.5])
    for function in (lambda x, y, alpha: add(x, y, alpha=alpha), lambda x, y, alpha: add(x, x * y, alpha=alpha)):
        compiled = tov.compile(function, dynamic=True, backend=backend)
        for y, alpha in ((0.3, 1.5), (0.7, 2.25)):
            torch.testing.assert_close(compiled(x, y, alpha), function(x, y, alpha))


SIGNS: dict[str, Callable[..., Any]] = {
    "negation": lambda x: -x,
    "quotient by a negation": lambda x: 1 / -x,
    "quotient by a negation further on": lambda x: 1 / torch.tanh(-x).unsqueeze(0),
    "copysign": lambda x: torch.copysign(torch.ones_like(x), -x),
    "atan2": lambda x: torch.atan2(-x, -x.abs()),
    "products with numbers": lambda x: (x * -2.5, x * 0, 1 / (x * 3), x / -4, (x * 0.3).round(), -2 * x),
    "power": lambda x: torch.pow(-x, -1),
}


@pytest.mark.parametrize("how", [{}, {"dynamic": True}, {"dynamic": True, "backend": "openvino_ts"}], ids=str)
@pytest.mark.parametrize("name", SIGNS)
def test_the_sign_of_zero(name: str, how: dict[str, Any]) -> None:
    compiled = tov.compile(SIGNS[name], options=ALL, **how)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.tensor([0.0, -0.0, 1.0, -2.0, 3.0]).repeat(3).to(dtype)
        for got, expected in zip(tuple(compiled(x)), tuple(SIGNS[name](x)), strict=True):
            assert torch.equal(torch.signbit(got), torch.signbit(expected))
            torch.testing.assert_close(got, expected)
    assert compiled.report.summary.coverage == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("dynamic", [False, True])
def test_many_indices_are_filled_without_comparing_each_with_each(dtype: torch.dtype, dynamic: bool) -> None:
    x, value = torch.randn(2, 300_000).to(dtype), torch.tensor(1)
    index = torch.randint(-300_000, 300_000, (200_000,))
    model = lambda x, i, v: (x.index_fill(1, i, 1), x.index_fill(-1, i, v), x.t().index_fill(0, i[:5], 0))
    compiled = check(model, x, index, value, strides=False, dynamic=dynamic, options=ALL)
    with pytest.raises((IndexError, RuntimeError)):
        compiled(x, torch.where(index == index[7], 300_000, index), value)


def test_windows_that_are_too_many_copies_are_eager_s() -> None:
    x = torch.randn(2**16)
    model = lambda x: (x * 2).unfold(0, 1024, 1).amax(-1)
    compiled = check(model, x, options=ALL, coverage=None, fallbacks={"unsupported_op": 1})
    assert "too many copies" in compiled.report.fallbacks[0].reason
    check(lambda x: (x * 2).unfold(0, 8, 1).amax(-1), x)


def test_bins_that_are_too_many_comparisons_are_eager_s() -> None:
    x = torch.randn(2**10)
    check(lambda x: torch.histc(x, 2**15, -1, 1), x, options=ALL, coverage=0.0, fallbacks={"unsupported_op": 1})
