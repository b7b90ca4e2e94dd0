"""Operators that OpenVINO converts wrongly or lacks: results equal eager, and the report says what ran where."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import torchserve_openvino as tov
from helpers import assert_same, check

X = torch.linspace(-2, 2, 60).reshape(3, 4, 5)

# All of each runs on OpenVINO.
CASES: list[tuple[str, Callable[[torch.Tensor], object]]] = [
    ("var_mean without correction", lambda x: torch.var_mean(x)),
    ("var without correction", lambda x: torch.var(x, 1)),
    ("std of everything", lambda x: torch.std(x)),
    ("a condition along rows, as a number", lambda x: (x > 0).any(-1, keepdim=True).float() / 3 + x.sum()),
    ("abs of an integer range", lambda x: torch.arange(-3, 2).abs() + x.abs().sum().to(torch.int64)),
    ("reflection padding", lambda x: F.pad(x, (1, 2), mode="reflect")),
    ("average pooling, ceil_mode", lambda x: F.avg_pool1d(x, 4, 3, 2, ceil_mode=True) * 2),
    ("average pooling", lambda x: F.avg_pool1d(x, 3, 2, 1)),
    ("a scalar expanded to a scalar", lambda x: x.sum().expand([]) + 1),
    ("clone alone", lambda x: x.clone()),
    ("moves that cancel out", lambda x: x.permute(1, 0, 2).clone().permute(1, 0, 2).contiguous()),
    ("scalar repeated", lambda x: x.sum().repeat(())),
    ("softplus", lambda x: F.softplus(x)),
    ("addcdiv", lambda x: torch.addcdiv(x, x, x.abs() + 1)),
    ("lerp", lambda x: torch.lerp(x, x * 2, 0.3)),
    ("nan_to_num", lambda x: torch.nan_to_num(x / x.round())),
    ("mish", lambda x: F.mish(x)),
    ("celu", lambda x: F.celu(x)),
    ("group norm", lambda x: F.group_norm(x, 2)),
    ("layer norm", lambda x: F.layer_norm(x, (5,))),
    ("attention", lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])),
    ("causal attention", lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)),
    ("bicubic resize", lambda x: F.interpolate(x[None], scale_factor=2, mode="bicubic")),
    ("bilinear resize", lambda x: F.interpolate(x[None], size=(7, 3), mode="bilinear", align_corners=True)),
    ("nearest resize", lambda x: F.interpolate(x[None], size=(7, 3))),
    (
        "bilinear products",
        lambda x: F.bilinear(x, x.flip(0), torch.linspace(-1, 1, 150).reshape(6, 5, 5), torch.ones(6)),
    ),
    ("integer floor division", lambda x: (x * 10).to(torch.int64) // 3 + (x * 9).to(torch.int64) // -4),
    ("integer logsumexp", lambda x: torch.logsumexp((x * 3).to(torch.int64), 1) + x.sum()),
    ("norms of single values", lambda x: torch.linalg.vector_norm(x[:, :1] * 1e38, 2, 1)),
    ("single values normalized", lambda x: F.normalize(x[:1] * 1e38, dim=0)),
]

# Pairs with NaN in one operand, and pairs without.
NAN = float("nan")
INTEGERS, FLOATS = torch.tensor([5, -3, 7, 0]), torch.tensor([1.0, NAN, 9.0, float("inf")])
COMPARED = {
    "gt": torch.gt,
    "ge": torch.ge,
    "lt": torch.lt,
    "le": torch.le,
    "fmin": torch.fmin,
    "fmax": torch.fmax,
    "numbers": lambda x, y: (x > 2.5, x >= -2.5, torch.gt(x, NAN), torch.ge(x, NAN), y > 2, torch.ge(y, NAN)),
}


@pytest.mark.quick(kind=[torch.int64, torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float16])
@pytest.mark.parametrize("name", COMPARED)
def test_nan_is_never_greater(name: str, kind: torch.dtype) -> None:
    function, x = COMPARED[name], INTEGERS.to(kind)
    compiled = tov.compile(function, options={"min_partition_us": 0})
    for given in ((x, FLOATS), (FLOATS, x)):
        assert_same(compiled(*given), function(*given), strides=False)


@pytest.mark.parametrize("function", [case[1] for case in CASES], ids=[case[0] for case in CASES])
def test_operator(function: Callable[[torch.Tensor], object]) -> None:
    compiled = tov.compile(function)
    with torch.no_grad():
        for _ in range(2):
            assert_same(compiled(X), function(X), strides=False)
    report = compiled.report
    assert report.summary.coverage == 1.0 and not report.fallbacks, report.to_text()


def test_indexed_nodes_return_positions() -> None:
    """Of the index that replaces the decoder's linear node lookup."""
    from torchserve_openvino.backend.upstream._openvino_private import _IndexedNodes

    graph = torch.fx.symbolic_trace(lambda x: torch.sin(torch.cos(x))).graph
    nodes = _IndexedNodes(list(graph.nodes))
    assert [nodes.index(node) for node in graph.nodes] == list(range(len(nodes)))


def test_custom_operator_of_the_user_falls_back_with_its_name() -> None:
    @torch.library.custom_op("tov_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    compiled = check(
        lambda x: torch.ops.tov_test.twice(x + 1) * 3,
        torch.randn(3),
        coverage=0.666667,
        fallbacks={"unsupported_op": 1},
        options={"min_partition_us": 0},
    )
    assert compiled.report.fallbacks[0].op == "tov_test.twice.default"


@pytest.mark.parametrize("dim", [None, 1, (0, 1)])
@pytest.mark.parametrize("order", [math.inf, -math.inf])
def test_the_largest_norm_keeps_nan(order, dim) -> None:
    x = torch.tensor([[math.nan, 1.0], [2.0, -3.0]])

    def norm(x):
        return torch.linalg.vector_norm(x, order, dim), torch.linalg.vector_norm(x[1:], order, dim, keepdim=True)

    check(norm, x, options={"min_partition_us": 0})


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("correction", [0.5, 1.5, 1.0, 2, 0])
def test_a_correction_may_be_a_fraction(correction, dynamic) -> None:
    def moments(x):
        return (
            x.var(1, correction=correction),
            x.std(1, correction=correction),
            *torch.var_mean(x, 1, correction=correction),
        )

    compiled = tov.compile(moments, dynamic=dynamic, options={"min_partition_us": 0})
    for length in (7, 9):
        x = torch.randn(3, length)
        assert_same(compiled(x), moments(x))


def test_the_sign_of_nan_is_0() -> None:
    x = torch.tensor([math.nan, 1e30, -2.0, 0.0, -0.0])
    check(lambda x: (x.sign(), x.sgn(), x.bfloat16().sign(), x.sign() * 2), x, options={"min_partition_us": 0})


@pytest.mark.parametrize(("least", "largest", "bins"), [(0, 5, 50), (-1, 1, 7), (0.1, 0.7, 3), (0, 9, 10)])
def test_bins_of_a_histogram(least, largest, bins) -> None:
    compiled = tov.compile(lambda x: torch.histc(x, bins, least, largest), options={"min_partition_us": 0})
    for count in (11, 31, 97, 1000):
        for x in (torch.linspace(least, largest, count), torch.linspace(least - 1, largest + 1, count)):
            assert compiled(x).equal(torch.histc(x, bins, least, largest))


class _Dropped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = torch.nn.Linear(4, 4), torch.nn.Dropout(0.1)
        self.both = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.inner(x)
        dropped = self.dropout(hidden)
        dropped += x
        return dropped, hidden, self.both(x) + x


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
def test_idle_dropout_returns_its_input_also_to_what_writes_to_it(backend, grad) -> None:
    model = _Dropped().eval().requires_grad_(grad)
    compiled, x = tov.compile(model, backend=backend), torch.randn(2, 4)
    with torch.set_grad_enabled(grad):
        own, other = x.clone(), x.clone()
        assert_same(compiled(own), model(other), strides=False)
    assert own.equal(other)
